"""GGUF to GGUF: what stays is copied byte for byte, the header follows the layers, and what is read back is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from helpers import SMALL, TEXT, TINY, VOCABULARY, Done, from_settings, make_tiny, with_large_weights, write_gguf
from transformers import PreTrainedModel

from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.evaluation.llama_cpp import ask, installed
from lyapunov_prune.export import gguf as exported
from lyapunov_prune.export import llama_cpp
from lyapunov_prune.export.gguf import prune_gguf, save_changed
from lyapunov_prune.export.gguf_original import gguf_identity, original_of
from lyapunov_prune.export.llama_cpp import ENGINE
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.healing.report import Healing
from lyapunov_prune.models.gguf import HISTORY_KEY, PROVENANCE_KEY
from lyapunov_prune.models.gguf_copy import Piece
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.loading import load
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance, made_by
from lyapunov_prune.pruning.removal import remove_layers
from lyapunov_prune.results.encoding import decode
from lyapunov_prune.results.history import history_of
from lyapunov_prune.results.result import Result
from lyapunov_prune.shrinking.report import Shrinking

GONE = (1, 4)
FAMILIES: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gpt2": {},
    "gemma2": {},
    "gemma3": {"attention.sliding_window_pattern": 3},
    "starcoder2": {},
    "stablelm": {},
    "nemotron": {},
}
# What transformers' reader takes for granted, whatever the file says.
GPT2 = {"max_position_embeddings": 1024, "num_key_value_heads": 4, "intermediate_size": 128}
SIZES = {"qwen3": {"head_dim": 128}, "gpt2": GPT2}
# Layers whose removal leaves windows that repeat: every other one, and every third one before.
GOES = {"gemma2": (2, 3), "gemma3": (0, 3)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)


@pytest.fixture
def file(reader: PreTrainedModel, tmp_path: Path) -> Path:
    return write_gguf(reader, tmp_path / "x.gguf", packed=True)


def on_disk(file: Path, target: Path, gone: tuple[int, ...] = GONE) -> Provenance:
    return prune_gguf(str(file), PruningPlan.given(gguf_identity(str(file), planned=False), gone), target)


def tensors(file: Path) -> dict[str, tuple[Any, bytes]]:
    """What the gguf package reads, which is not what this program reads by."""
    return {t.name: ((t.tensor_type, *t.shape.tolist()), t.data.tobytes()) for t in GGUFReader(file).tensors}


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(len(VOCABULARY), (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_ten_architectures_lose_layers_and_load(name: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": len(VOCABULARY), **SIZES.get(name, {})}
    model = make_tiny(name, **sizes) if name in TINY else with_large_weights(from_settings(name, **(SMALL | sizes)))
    file = write_gguf(model, tmp_path / "x.gguf", packed=True, values=FAMILIES[name])
    gone, dense = GOES.get(name, GONE), load(file)
    plan = PruningPlan.given(dense, gone)
    written = write_pruned(dense, dense.tokenizer, plan, tmp_path / "y.gguf", format="gguf")

    before, after = tensors(file), tensors(tmp_path / "y.gguf")
    for key, value in after.items():
        parts = key.split(".")
        if parts[0] == "blk":
            parts[1] = str(plan.kept[int(parts[1])])
        assert value == before[".".join(parts)]
    assert len(after) == sum(not key.startswith(tuple(f"blk.{i}." for i in gone)) for key in before)
    assert {check.name for check in written.gate.checks} >= {"same as skipping", "reloads as saved"}
    again = load(tmp_path / "y.gguf")
    assert again.structure.num_layers == 4
    assert torch.equal(logits(again.model), logits(remove_layers(dense.model, plan)))
    if installed():
        (answers,) = ask([tmp_path / "y.gguf"], [range(3, 40)], greedy=4, batch=32)
        assert np.isfinite(answers.windows[0].values).all()


def test_both_ways_write_the_same_tensors_and_keys(file: Path, tmp_path: Path) -> None:
    dense = load(file)
    write_pruned(dense, None, PruningPlan.given(dense, GONE), tmp_path / "a.gguf", format="gguf")
    told = on_disk(file, tmp_path / "b.gguf")
    assert set(told.not_run) == {"same as skipping", "cached decoding", "reloads as saved", ENGINE}
    assert tensors(tmp_path / "a.gguf") == tensors(tmp_path / "b.gguf")
    first, second, source = (read_header(path) for path in (tmp_path / "a.gguf", tmp_path / "b.gguf", file))
    own = {PROVENANCE_KEY, HISTORY_KEY}
    assert {k: v for k, v in first.values.items() if k not in own} == {
        k: v for k, v in second.values.items() if k not in own
    }
    changed = {key for key, value in source.values.items() if first.values[key] != value}
    assert changed == {"llama.block_count"}
    assert first.values.keys() == source.values.keys() | own


def test_the_header_says_where_the_file_came_from(file: Path, tmp_path: Path) -> None:
    dense = load(file)
    written = write_pruned(dense, None, PruningPlan.given(dense, GONE), tmp_path / "y.gguf", format="gguf")
    content = json.loads(read_header(tmp_path / "y.gguf").read(PROVENANCE_KEY))
    assert content.pop("kind") == "Provenance"
    told = decode(Provenance, content)
    assert told.gate.passed
    assert told.not_run == (ENGINE,)
    assert told.source == written.source == str(file)
    assert told.kept_to_original == (0, 2, 3, 5)
    on_disk(tmp_path / "y.gguf", tmp_path / "z.gguf", (0,))
    steps = history_of(load(tmp_path / "z.gguf").model).steps
    assert [(step.kind, step.source) for step in steps] == [("prune", str(file)), ("prune", str(tmp_path / "y.gguf"))]


def test_an_array_of_every_layer_loses_those_that_go(reader: PreTrainedModel, tmp_path: Path) -> None:
    arrays = {"attention.some_new_counts": [0, 1, 2, 3, 4, 5], "rope.dimension_sections": [8, 8, 8, 0]}
    file = write_gguf(reader, tmp_path / "x.gguf", values=arrays)
    on_disk(file, tmp_path / "y.gguf")
    fields = GGUFReader(tmp_path / "y.gguf").fields
    assert fields["llama.attention.some_new_counts"].contents() == [0, 2, 3, 5]
    assert fields["llama.rope.dimension_sections"].contents() == [8, 8, 8, 0]
    assert len(fields["tokenizer.ggml.tokens"].contents()) == len(VOCABULARY)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"attention.some_new_counts": [0, 1, 2, 3, 4]}, "holds 5 values for 6 layers"),
        ({"leading_dense_block_count": 2}, "leading_dense_block_count names layers by number"),
    ],
)
def test_a_header_that_cannot_follow_is_refused(
    values: dict[str, Any], told: str, reader: PreTrainedModel, tmp_path: Path
) -> None:
    file = write_gguf(reader, tmp_path / "x.gguf", values=values)
    with pytest.raises(LyapunovPruneError, match=told):
        on_disk(file, tmp_path / "y.gguf")
    assert not (tmp_path / "y.gguf").exists()


def test_a_quantisation_that_nobody_knows_is_copied(file: Path, tmp_path: Path) -> None:
    tensor = next(t for t in read_header(file).tensors if t.name == "blk.2.ffn_up.weight")
    content = bytearray(file.read_bytes())
    at = content.index(tensor.name.encode()) + len(tensor.name) + 4 + 8 * len(tensor.dims)
    content[at : at + 4] = (199).to_bytes(4, "little")
    file.write_bytes(content)
    on_disk(file, tmp_path / "y.gguf")
    (kept,) = [t for t in read_header(tmp_path / "y.gguf").tensors if t.name == "blk.1.ffn_up.weight"]
    assert kept.kind == 199
    place = slice(kept.start, kept.start + tensor.size)
    assert (tmp_path / "y.gguf").read_bytes()[place] == content[tensor.start : tensor.start + tensor.size]


def test_a_file_in_parts_is_one_model(reader: PreTrainedModel, file: Path, tmp_path: Path) -> None:
    write_gguf(reader, tmp_path / "p.gguf", packed=True, split_max_tensors=20)
    part = tmp_path / "p-00002-of-00003.gguf"
    on_disk(part, tmp_path / "y.gguf")
    on_disk(file, tmp_path / "z.gguf")
    assert tensors(tmp_path / "y.gguf") == tensors(tmp_path / "z.gguf")
    assert "split.count" not in read_header(tmp_path / "y.gguf").values
    assert torch.equal(logits(load(part).model), logits(load(file).model))
    (tmp_path / "p-00003-of-00003.gguf").unlink()
    with pytest.raises(LyapunovPruneError, match=r"p-00003-of-00003\.gguf is not beside it"):
        on_disk(part, tmp_path / "u.gguf")
    (tmp_path / "p-00003-of-00003.gguf").write_bytes(part.read_bytes()[:-100])
    with pytest.raises(LyapunovPruneError, match=r"p-00003-of-00003\.gguf is truncated"):
        on_disk(part, tmp_path / "u.gguf")
    assert not (tmp_path / "u.gguf").exists()


def test_windows_that_no_period_tells_are_refused(tmp_path: Path) -> None:
    model = make_tiny("gemma3", vocab_size=len(VOCABULARY))
    file = write_gguf(model, tmp_path / "x.gguf", values=FAMILIES["gemma3"])
    for write in (
        lambda: on_disk(file, tmp_path / "y.gguf", (0,)),
        lambda: write_pruned(load(file), None, PruningPlan.given(load(file), (0,)), tmp_path / "y.gguf", format="gguf"),
    ):
        with pytest.raises(LyapunovPruneError, match="whole periods"):
            write()
    on_disk(file, tmp_path / "y.gguf", (0, 1, 2))
    assert load(tmp_path / "y.gguf").model.config.layer_types[2] == "full_attention"


def test_layers_of_a_file_with_windows_go_by_whole_periods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_gguf(make_tiny("gemma3", vocab_size=len(VOCABULARY)), Path("x.gguf"), values=FAMILIES["gemma3"])
    Path("words.txt").write_text("".join(word for word in VOCABULARY if word.isascii() and word.isalpha()) * 40)
    text = ("--text", "words.txt", "--tokens", "64", "--context", "8")
    done = run("prune", str(file), "--remove", "3", "-o", "y.gguf", *text)
    assert done.code == 0, done.err
    told = made_by("y.gguf")
    assert told is not None
    assert told.plan.remove in ((0, 1, 2), (3, 4, 5))
    for more in (("--remove", "2"), ("--remove", "3", "--criterion", "best")):
        assert run("prune", str(file), *more, "-o", "z.gguf", *text).code == 2


@pytest.mark.parametrize("fault", ["swapped", "dropped", "changed"])
def test_a_file_with_a_wrong_layer_fails_the_gate(
    fault: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = exported.write_pieces

    def faulty(path: Path, values: Any, pieces: list[Piece], alignment: int) -> dict[str, int]:
        (i, one), (k, other) = [(i, p) for i, p in enumerate(pieces) if p.name.endswith("ffn_up.weight")][:2]
        if fault == "swapped":
            pieces[i], pieces[k] = Piece(one.name, other.source), Piece(other.name, one.source)
        if fault == "dropped":
            del pieces[i]
        places = write(path, values, pieces, alignment)
        if fault == "changed":
            with path.open("r+b") as opened:
                opened.seek(-one.size, 2)
                opened.write(bytes(one.size))
        return places

    monkeypatch.setattr(exported, "write_pieces", faulty)
    with pytest.raises(CheckFailed, match="layers in their places"):
        on_disk(file, tmp_path / "y.gguf")
    assert not list(tmp_path.glob("*y.gguf*"))


def test_a_model_that_is_not_the_file_fails_the_gate(file: Path, tmp_path: Path) -> None:
    dense = load(file)
    with torch.no_grad():
        dense.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(CheckFailed, match="reloads as saved"):
        write_pruned(dense, None, PruningPlan.given(dense, GONE), tmp_path / "y.gguf", format="gguf")
    assert not (tmp_path / "y.gguf").exists()


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_truncated_file(share: float, file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(LyapunovPruneError, match=r"x\.gguf is truncated"):
        on_disk(file, tmp_path / "y.gguf")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("prune x.gguf --layers 1 -o there.gguf", "there.gguf exists"),
        ("prune x.gguf --layers 1 --device disk -o there.gguf", "there.gguf exists"),
        ("prune x.gguf --layers 1 --device disk -o x.gguf", "x.gguf exists"),
        ("prune x.gguf --layers 1 --device disk -o y", "end --output in .gguf"),
        ("prune x.gguf --layers 1 --what attention -o y.gguf", "give a folder as --output"),
        ("prune x.gguf --plan p.json --device disk -o y.gguf", "not in the cache"),
        ("prune tiny --layers 1 -o y.gguf", "was not read from a GGUF file"),
        ("prune tiny --layers 1 --device disk -o y.gguf", "was not read from a GGUF file"),
        ("prune absent.gguf --layers 1 --device disk -o y.gguf", "no file absent.gguf"),
    ],
)
def test_a_command_that_cannot_be_is_refused_in_a_line(
    command: str,
    told: str,
    file: Path,
    checkpoint: Path,
    run_bad: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(file.parent)
    (file.parent / "there.gguf").write_text("mine")
    PruningPlan.given(make_tiny("llama"), (1,)).save("p.json")
    assert told in run_bad(*command.split())
    assert not Path("y.gguf").exists()
    assert Path("there.gguf").read_text() == "mine"


def test_a_plan_is_held_against_the_dequantised_weights(
    file: Path, run: Callable[..., Done], run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    PruningPlan.given(load("x.gguf"), GONE).save("p.json")
    PruningPlan.given(make_tiny("llama", seed=5), GONE).save("other.json")
    done = run("prune", "x.gguf", "--plan", "p.json", "--device", "disk", "-o", "y.gguf")
    assert "eval y.gguf --against x.gguf" in done.out
    for more in ([], ["--device", "disk"]):
        assert "this plan is of" in run_bad("prune", "x.gguf", "--plan", "other.json", *more, "-o", "z.gguf")
    PruningPlan.given(load("x.gguf"), [0, 1]).save("p.json")
    run("prune", "x.gguf", "--plan", "p.json", *TEXT, "-o", "w.gguf")
    assert read_header(Path("w.gguf")).layers == 4
    assert gguf.GGMLQuantizationType.Q8_0 in {t.kind for t in read_header(Path("w.gguf")).tensors}


def unchanged(file: Path, source: Path, kept: tuple[int, ...]) -> set[str]:
    """The tensors of `file` that hold the bytes that they had in `source`, before the layers went."""
    before, same_bytes = tensors(source), set()
    for key, value in tensors(file).items():
        parts = key.split(".")
        if parts[0] == "blk":
            parts[1] = str(kept[int(parts[1])])
        if value == before[".".join(parts)]:
            same_bytes.add(key)
    return same_bytes


def test_only_what_changed_is_written_anew(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lyapunov_prune.models.weight_files.BUFFER", 64)  # of several parts, as large tensors are
    dense, made = load(file), load(file)
    original = original_of(dense)
    with torch.no_grad():
        made.layers[2].mlp.up_proj.weight.mul_(1.5)
    assert save_changed(tmp_path / "y.gguf", original, made, None) is None
    (changed,) = tensors(file).keys() - unchanged(tmp_path / "y.gguf", file, tuple(range(6)))
    assert changed == "blk.2.ffn_up.weight"
    (stored,) = [t for t in read_header(tmp_path / "y.gguf").tensors if t.name == changed]
    assert stored.quantisation == "Q8_0"
    assert torch.equal(logits(load(tmp_path / "y.gguf").model), logits(made.model))  # which was rounded too


@pytest.mark.usefixtures("healing_kept")
@pytest.mark.parametrize("cut", ["cut", "cut.gguf"])
def test_a_pruned_model_is_healed_into_a_file(
    cut: str, file: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert run("prune", "x.gguf", "--layers", "1,4", "-o", cut, *TEXT).code == 0
    done = run(
        "heal",
        cut,
        "--teacher",
        "x.gguf",
        "--steps",
        "2",
        "--text",
        "builtin",
        "-o",
        "y.gguf",
        *TEXT,
        "--context",
        "16",
    )
    assert done.code == 0, done.err
    assert "tensors changed and are written again" in done.err
    same = unchanged(Path("y.gguf"), file, (0, 2, 3, 5))
    assert {"token_embd.weight", "output.weight"} <= same
    assert not any(name.startswith("blk.") and "ffn_up" in name for name in same)
    assert [step.kind for step in history_of(load("y.gguf").model).steps] == ["prune", "heal"]
    told = made_by("y.gguf")
    assert told is not None
    assert told.plan.remove == (1, 4)
    assert {"layers in their places", "reloads as saved"} <= {check.name for check in told.gate.checks}
    healing = Healing.load(f"runs/{cut}/healing.json")
    assert healing.steps == 2
    described(healing)


def described(result: Result) -> None:
    """The file `y.gguf` says in its header what `result` has measured."""
    ratio = result.against_dense()
    assert ratio is not None
    assert ratio.told()[1:] in str(read_header(Path("y.gguf")).read("general.description"))


@pytest.mark.usefixtures("healing_kept")
def test_a_model_shrinks_into_a_file(file: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr("lyapunov_prune.shrinking.healing.STEPS", 2)
    small = ("--tokens", f"{32 * 24}", "--context", "24")
    done = run("shrink", "x.gguf", "--remove", "2", "-o", "y.gguf", "--text", "builtin", *small)
    assert done.code == 0, done.err
    assert "Written: y.gguf" in done.out
    report = Shrinking.load("runs/x.gguf/shrink.json")
    assert report.size == (file.stat().st_size, Path("y.gguf").stat().st_size)
    assert "output.weight" in unchanged(Path("y.gguf"), file, report.plan.kept)
    told = made_by("y.gguf")
    assert told is not None
    assert told.commands == report.commands
    described(report)
    assert load("y.gguf").structure.num_layers == 4


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("shrink tiny --remove 1 -o y.gguf", "was not read from a GGUF file"),
        ("shrink x.gguf --remove 1 -o there.gguf", "there.gguf exists"),
        ("shrink g.gguf --remove 1 -o y.gguf", "use prune"),
        ("heal tiny --teacher tiny -o y.gguf", "was not read from a GGUF file"),
    ],
)
def test_what_no_file_can_be_made_of_is_refused(
    command: str, told: str, file: Path, run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(file.parent.parent / "elsewhere"))
    (file.parent / "there.gguf").write_text("mine")
    write_gguf(make_tiny("gemma3", vocab_size=len(VOCABULARY)), Path("g.gguf"), values=FAMILIES["gemma3"])
    assert told in run_bad(*command.split())
