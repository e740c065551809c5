"""A pruned checkpoint is a plain transformers folder, written whole or not at all."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml
from helpers import KINDS, VOCABULARY, limit_file_size, make_tiny, wrong_layer_idx
from helpers.forked import FORKED
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.cli.app import main
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.text import load_text
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.export import compact
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.influence import block_influence
from lyapunov_prune.pruning import surgery
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.pruning.removal import remove_layers
from lyapunov_prune.pruning.removed import PartsGone
from lyapunov_prune.pruning.surgery import Operation
from lyapunov_prune.ranking.measured import rank_layers
from lyapunov_prune.results.history import HISTORY
from lyapunov_prune.results.result import versions

pytestmark = pytest.mark.xdist_group("checkpoint")  # one process makes `reloaded`, not each

REMOVE = (1, 4)
IDS = torch.randint(len(VOCABULARY), (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def batch(tokenizer: PreTrainedTokenizerFast) -> TokenBatch:
    return load_text("builtin", tokenizer, tokens=256, context=64)


@pytest.fixture(scope="module")
def plan(reader: PreTrainedModel, batch: TokenBatch) -> PruningPlan:
    profile = measure_contraction(reader, batch, seeds=range(2))
    return rank_layers(profile, block_influence(reader, batch), criterion="blend", alpha=0.25).plan(2)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "pruned"


@pytest.fixture
def write(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, plan: PruningPlan, batch: TokenBatch, target: Path
) -> Callable[[], Provenance]:
    return lambda: write_pruned(reader, tokenizer, plan, target, batch)


# What is written.

# Every folder of sys.argv[1] is loaded; its logits for the ids beside it are saved into it.
PLAIN = """
import os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = torch.load(sys.argv[1] + "/ids")
for name in os.listdir(sys.argv[1]):
    folder = os.path.join(sys.argv[1], name)
    if os.path.isdir(folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder)("the")["input_ids"] == ids["the"]
        with torch.no_grad():
            torch.save(model(ids["ids"]).logits, folder + "/logits")
assert not [name for name in sys.modules if name.startswith("lyapunov")]
"""


@pytest.fixture(scope="module")
def reloaded(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned checkpoint of every family, and the logits that a new process got from it."""
    run = tmp_path_factory.mktemp("pruned")
    for name in KINDS:
        model = make_tiny(name, vocab_size=len(VOCABULARY))
        write_pruned(model, tokenizer, PruningPlan.given(model, REMOVE), run / name)
    torch.save({"ids": IDS, "the": tokenizer("the")["input_ids"]}, run / "ids")
    ((code, _, told),) = FORKED.run_together(PLAIN, [os.environ], str(run), str(run))
    assert code == 0, told
    return run


def test_plain_transformers_in_a_new_process_gives_the_same_logits(family: str, reloaded: Path) -> None:
    with torch.no_grad():
        pruned = remove_layers(make_tiny(family, vocab_size=len(VOCABULARY)), REMOVE)
        assert torch.equal(torch.load(reloaded / family / "logits"), pruned(IDS).logits)


def test_the_folder_holds_a_checkpoint_and_nothing_more(write: Callable[[], Provenance], target: Path) -> None:
    write()
    wanted = {"README.md", PROVENANCE, HISTORY, "config.json", "generation_config.json", "model.safetensors"}
    assert set(os.listdir(target)) == wanted | {"tokenizer.json", "tokenizer_config.json"}
    assert os.listdir(target.parent) == ["pruned"]


def test_the_removed_layers_are_not_on_disk(write: Callable[[], Provenance], target: Path) -> None:
    write()
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 4
    with safe_open(target / "model.safetensors", framework="pt") as tensors:
        layers = {int(key.split(".")[2]) for key in tensors.keys() if ".layers." in key}  # noqa: SIM118
    assert layers == {0, 1, 2, 3}


def test_the_original_is_left_alone(write: Callable[[], Provenance], reader: PreTrainedModel) -> None:
    before = {name: tensor.clone() for name, tensor in reader.state_dict().items()}
    config = reader.config.to_dict()
    write()
    assert reader.config.to_dict() == config
    assert reader.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in reader.state_dict().items())


def test_the_provenance_tells_where_the_model_came_from(
    write: Callable[[], Provenance], plan: PruningPlan, batch: TokenBatch, target: Path
) -> None:
    written = write()
    read = Provenance.load(target / PROVENANCE)
    assert read.to_json() == written.to_json()
    assert read.kept_to_original == plan.kept == tuple(i for i in range(6) if i not in plan.remove)
    assert read.plan.to_json() == plan.to_json()
    assert len(read.plan.scores) == 6
    assert read.gate.passed
    assert len(read.gate.checks) == 4
    assert read.versions == versions()
    for measured in read.plan.measured_on:
        assert (measured.text_hash, measured.context, measured.dtype) == (batch.text_hash, 64, "float32")
        assert (measured.bos, measured.split, measured.tokens) == (False, "calibration", 256)


def test_the_card_says_what_was_done(write: Callable[[], Provenance], plan: PruningPlan, target: Path) -> None:
    write()
    card = (target / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "with 4 of 6 layers" in card
    assert f"Layers of the original, counted from 0: {', '.join(map(str, plan.remove))}." in card
    assert f"by blend (alpha 0.25): {', '.join(map(str, plan.remove))}" in card
    assert plan.measured_on[0].line() in card
    assert card.count("| passed |") == 4


def test_the_card_of_layers_given_by_hand_claims_no_measurement(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, target: Path
) -> None:
    write_pruned(reader, tokenizer, PruningPlan.given(reader, [3]), target)
    assert "- nothing: the layers were given by hand" in (target / "README.md").read_text(encoding="utf-8")


# Names that others chose: text in the card and on the terminal, and nothing else.

STRANGE = {
    "keys": "org/model\ntags:\n- evil\nlicense: mit",
    "colon": "org/model: {a: b}",
    "end of line": "org/model\n",
    "front matter": "org/model\n---\n# Another card",
    "screen": "org/\x1b[2J\x1b]0;title\x07model\r\u202elive",
    "markdown": "org/[a](http://b)`c`<img src=x>|d\\*e*",
}


def front(card: str) -> dict[str, Any]:
    _, text, _ = card.split("---\n", 2)
    return yaml.safe_load(text)


@pytest.mark.parametrize("name", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("where", ["model", "plan file"])
def test_a_strange_name_is_text_in_the_card(
    name: str,
    where: str,
    tiny: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    batch: TokenBatch,
    plan: PruningPlan,
    target: Path,
) -> None:
    model = tiny("llama", vocab_size=len(VOCABULARY))
    if where == "model":
        model.config._name_or_path = name
        plan = rank_layers(influence=block_influence(model, batch), criterion="bi").plan(1)
    else:
        data = json.loads(plan.save(target.parent / "plan.json").read_text())
        data["model"]["name"] = data["criterion"] = name
        for measured in data["measured_on"]:
            measured["model"]["name"] = measured["text"] = name
        (target.parent / "plan.json").write_text(json.dumps(data))
        plan = PruningPlan.load(target.parent / "plan.json")
    plain = replace(plan, criterion="bi", model=replace(plan.model, name="x"), measured_on=())
    write_pruned(model, tokenizer, plain, target.parent / "plain")
    write_pruned(model, tokenizer, plan, target)
    card, other = ((folder / "README.md").read_text(encoding="utf-8") for folder in (target, target.parent / "plain"))
    told = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert front(card) == front(other) == told | {"tags": ["lyapunov-prune", "depth-pruning"]}
    marks = [re.findall(r"^(?:#|\||`|--)", text, re.M) for text in (card, other)]
    assert marks[0] == marks[1]
    assert all(c.isprintable() for c in card.replace("\n", ""))
    markup = re.sub(r"\\\\|\\[`*\[\]<>|&]", "", card)
    assert not re.search(r"http[^\n]*\)\]|<img|\]\(http|`c`", markup)
    assert all(c.isprintable() for c in plan.sentence())


def test_all_files_of_a_checkpoint_have_the_permissions_that_the_umask_leaves(
    write: Callable[[], Provenance], target: Path
) -> None:
    before = os.umask(0o027)
    try:
        write()
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in [target, *target.iterdir()]} == {
        path.name: oct(0o750 if path.is_dir() else 0o640) for path in [target, *target.iterdir()]
    }


# What is refused.


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ("pruned/mine", "not empty"),
        ("pruned", "is a file"),
    ],
)
def test_a_target_with_something_in_it_is_kept(
    there: str, told: str, write: Callable[[], Provenance], target: Path
) -> None:
    (target.parent / there).parent.mkdir(exist_ok=True)
    (target.parent / there).write_text("mine")
    with pytest.raises(LyapunovPruneError, match=told):
        write()
    assert (target.parent / there).read_text() == "mine"


def test_a_plan_for_another_model_is_refused(
    tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, plan: PruningPlan, target: Path
) -> None:
    other = tiny("llama", seed=1, vocab_size=len(VOCABULARY))
    with pytest.raises(LyapunovPruneError, match="this plan is of"):
        write_pruned(other, tokenizer, plan, target)
    assert os.listdir(target.parent) == []


def changed_weight(model: PreTrainedModel) -> None:
    with torch.no_grad():
        find_structure(model).layers[1].mlp.up_proj.weight.mul_(1.01)


def wrong_layer_count(model: PreTrainedModel) -> None:
    model.config.num_hidden_layers = 3


@pytest.mark.parametrize("fault", [wrong_layer_idx, changed_weight, wrong_layer_count])
def test_a_model_that_fails_the_gate_is_not_written(
    fault: Callable[[PreTrainedModel], None],
    write: Callable[[], Provenance],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = surgery.cut

    def wrongly(decoder: Decoder, operation: Operation, **how: Any) -> Decoder:
        pruned = right(decoder, operation)
        fault(pruned.model)
        return pruned

    monkeypatch.setattr(surgery, "cut", wrongly)
    with pytest.raises(CheckFailed, match="fails the removal check") as caught:
        write()
    assert caught.value.exit_code == 1
    assert os.listdir(target.parent) == []


def test_the_gate_reads_the_files_that_were_written(
    write: Callable[[], Provenance], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(self: Any, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"] *= 1.01
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", spoil)  # it runs after the weights are written
    with pytest.raises(CheckFailed, match="reloads as saved"):
        write()
    assert os.listdir(target.parent) == []


# A disk that fills up, and a process that is killed.


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
    ids=["OSError", "SafetensorError"],
)
@pytest.mark.parametrize("saver", [PreTrainedModel, PreTrainedTokenizerFast], ids=["weights", "tokenizer"])
def test_a_disk_that_fills_up_leaves_nothing(
    saver: type, error: Exception, write: Callable[[], Provenance], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self: Any, folder: Path, **options: Any) -> NoReturn:
        (Path(folder) / "half").write_text("half")
        raise error

    monkeypatch.setattr(saver, "save_pretrained", half)
    with pytest.raises(LyapunovPruneError, match=r"pruned failed.*No space left"):
        write()
    assert os.listdir(target.parent) == []


def die_while_saving() -> None:
    """The process is killed at the moment when the weights are half written."""

    def save_pretrained(self: Any, folder: Path, **options: Any) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]


def prune_in_a_child(prepare: Callable[[], None], checkpoint: Path, target: Path) -> tuple[int | None, str]:
    """Exit code (negative: a signal) and stderr of `prune` in a process of its own, set up by `prepare`."""
    options = ["--layers", "1,4", "--tokens", "128", "--context", "64", "--output", str(target)]

    def child() -> None:
        sys.stderr = errors
        sys.argv = ["lyapunov-prune", "prune", str(checkpoint), *options]
        prepare()
        main()

    with tempfile.TemporaryFile("w+") as errors:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        errors.seek(0)
        return process.exitcode, errors.read()


@pytest.mark.parametrize("size", [400, 6_000, 60_000], ids=["config", "tokenizer", "weights"])
def test_a_real_limit_on_file_size_leaves_nothing(size: int, checkpoint: Path, target: Path) -> None:
    code, errors = prune_in_a_child(lambda: limit_file_size(size), checkpoint, target)
    assert code == 2, errors
    assert errors.startswith(f"error: writing {target} failed: ")
    assert len(errors.splitlines()) == 1
    assert os.listdir(target.parent) == [checkpoint.name]


def test_a_killed_process_leaves_no_folder_of_that_name(checkpoint: Path, target: Path) -> None:
    code, _ = prune_in_a_child(die_while_saving, checkpoint, target)
    assert code == -signal.SIGKILL
    assert not target.exists()


def test_what_a_killed_process_left_is_no_obstacle(
    checkpoint: Path, write: Callable[[], Provenance], target: Path
) -> None:
    prune_in_a_child(die_while_saving, checkpoint, target)
    write()
    assert Provenance.load(target / PROVENANCE).gate.passed


def test_the_card_says_which_scores_were_rounding(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, plan: PruningPlan, target: Path
) -> None:
    write_pruned(reader, tokenizer, dataclasses.replace(plan, below_floor=(1, 3)), target)
    assert "rho lies below the rounding floor at layer 1, 3" in " ".join((target / "README.md").read_text().split())
    assert Provenance.load(target / "provenance.json").plan.below_floor == (1, 3)


@pytest.mark.parametrize("format", ["plain", "compact"])
def test_the_pruned_model_takes_no_memory_of_its_own_for_what_it_keeps(
    format: Any,
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batch: TokenBatch,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(function(*args, **kwargs))
            return made[-1]

        return call

    monkeypatch.setattr(surgery, "cut", keeping(surgery.cut))
    monkeypatch.setattr(compact, "make_compact", keeping(compact.make_compact))
    plan = PruningPlan.given(reader, PartsGone((0,), (1,)) if format == "compact" else [0])
    write_pruned(reader, tokenizer, plan, target, batch, format=format)
    pruned = wrap(made[0]).model
    places = {p.data_ptr() for p in reader.parameters()}
    assert all(p.data_ptr() in places for p in pruned.parameters())


def test_a_cut_that_writes_into_what_both_share_is_not_written(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate alone would pass: it would find the zeros in the original too."""
    model, right = copy.deepcopy(reader), surgery.cut

    def zero_in_place(*given: Any, **how: Any) -> Any:
        made = right(*given, **how)
        next(iter(made.layers[0].parameters())).data.zero_()
        return made

    monkeypatch.setattr(surgery, "cut", zero_in_place)
    with pytest.raises(LyapunovPruneError, match="this plan is of"):
        write_pruned(model, tokenizer, PruningPlan.given(model, [1]), target)
    assert os.listdir(target.parent) == []
