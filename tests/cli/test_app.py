"""The command line: what it writes, and one line and an exit code for whatever is wrong."""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import re
import shutil
import sys
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers import (
    BROKEN,
    QUICK,
    TEXT,
    VOCABULARY,
    Done,
    bert,
    disk_full,
    make_tiny,
    saved,
    write_gguf,
    wrong_layer_idx,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertLMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.bounds import approximation as approx_module
from lyapunov_prune.bounds import check as checks_module
from lyapunov_prune.bounds.report import BoundsReport
from lyapunov_prune.cli import demo as demo_module
from lyapunov_prune.cli.inputs import folder_name
from lyapunov_prune.compression.report import CompressionReport
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.forward import decoding
from lyapunov_prune.healing import state as training_state
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.report import Healing
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.models import loading
from lyapunov_prune.predictions import generation as generation_module
from lyapunov_prune.predictions.choices import ChoiceComparison
from lyapunov_prune.predictions.generation import GenerationDivergence
from lyapunov_prune.predictions.hierarchy import HierarchyProbe
from lyapunov_prune.predictions.verdict import Verdict
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.pruning import checkpoint as checkpoint_module
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.pruning.removal import remove_layers
from lyapunov_prune.pruning.surgery import cut
from lyapunov_prune.ranking.amount import BudgetedCompression
from lyapunov_prune.ranking.budget import BudgetedRemoval
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.results.history import History
from lyapunov_prune.results.result import Result
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.sensitivity import Sensitivity
from lyapunov_prune.sensitivity.sweep import Sweep

# Its room gives the function of this name.
attention_paths_module = importlib.import_module("lyapunov_prune.predictions.attention_paths")

# Every command that takes a model, on the folder `tiny`.
COMMANDS: dict[str, list[str]] = {
    "profile": ["profile", "tiny", *QUICK],
    "rank": ["rank", "tiny", "--remove", "1", *TEXT],
    "prune": ["prune", "tiny", "--remove", "1", "-o", "out", *TEXT],
    "prune --layers": ["prune", "tiny", "--layers", "1", "-o", "out", *TEXT],
    "compress": ["compress", "tiny", "--sparsity", "0.5", "-o", "out", *TEXT],
    "eval": ["eval", "tiny", *TEXT],
    "check": ["check", "tiny", "--sparsity", "0.5", *TEXT],
    "sensitivity": ["sensitivity", "tiny", "--study", "layer,removal", *TEXT],
}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> list[str]:
    return COMMANDS[request.param]


# What the commands write.


def test_profile_writes_its_result_and_the_report(run: Callable[..., Done]) -> None:
    done = run("profile", "tiny", "-o", "run", *QUICK)
    assert (done.code, done.err) == (0, "")
    assert {"run/profile.json", "run/report.html", "run/figures/contraction.svg"} <= done.changed
    assert str(LayerProfile.load("run/profile.json")) in done.out


def test_results_go_to_a_folder_named_after_the_model(run: Callable[..., Done]) -> None:
    assert "runs/tiny/profile.json" in run(*COMMANDS["profile"]).changed


def test_check_writes_every_matrix_and_setting(run: Callable[..., Done]) -> None:
    done = run("check", "tiny", "-o", "run", "--tokens", "16", "--context", "16")
    assert (done.code, done.err) == (0, "")
    report = BoundsReport.load("run/bounds.json")
    assert report.checks == 30 * len(report.names)
    assert not report.violations
    assert "0 violations" in done.out


def test_a_violated_bound_is_exit_code_1(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: norms that are too small."""
    certified = approx_module.certify
    monkeypatch.setattr(approx_module, "certify", lambda W: replace(certified(W), bound=certified(W).bound * 0.99))
    done = run(*COMMANDS["check"])
    assert done.code == 1
    assert "bounds are violated" in done.err
    assert "VIOLATED" in done.out


def test_check_reads_what_was_written(run: Callable[..., Done], run_bad: Callable[..., str]) -> None:
    few = ["--tokens", "32", "--context", "16"]
    run("compress", "tiny", "--method", "wanda", "--sparsity", "0.5", "-o", "sparse", *TEXT)
    done = run("check", "tiny", "sparse", "-o", "run", *few)
    assert (done.code, done.err) == (0, "")
    assert {"run/bounds.json", "run/report.html", "run/figures/bounds.svg", "run/figures/ratios.svg"} <= done.changed
    report = BoundsReport.load("run/bounds.json")
    assert str(report) in done.out
    assert report.compressed is not None
    assert (report.measured_on.model.name, report.compressed.name) == ("tiny", "sparse")
    assert json.loads(run("check", "tiny", "sparse", "-o", "run", *few, "--json").out) == report.to_json()
    for option in (["--sparsity", "0.5"], ["--rank", "2"], ["--cache-radius", "0.1"], ["--resume"]):
        assert "without --sparsity" in run_bad("check", "tiny", "sparse", *option, *few)
    assert "nothing to check" in run_bad("check", "tiny", "tiny", *few)
    assert "both in one dtype" in run_bad("check", "tiny", half("sparse"), *few)
    run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT)
    assert "5 layers and the dense one 6" in run_bad("check", "tiny", "out", *few)


def half(folder: str) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    shutil.copytree(folder, "half", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained("half")
    return "half"


def test_a_written_bound_that_is_violated_is_exit_code_1(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("compress", "tiny", "--method", "rtn", "--bits", "4", "-o", "rounded")
    certified = approx_module.certify
    monkeypatch.setattr(approx_module, "certify", lambda W: replace(certified(W), bound=certified(W).bound * 0.99))
    done = run("check", "tiny", "rounded", "--tokens", "32", "--context", "16")
    assert done.code == 1
    assert "see runs/tiny/bounds.json" in done.err
    assert "VIOLATION: sparse_activation_bound is VIOLATED by" in done.out


def test_rank_reads_a_profile_and_measures_nothing(run: Callable[..., Done]) -> None:
    run("profile", "tiny", "-o", "run", *QUICK)
    shutil.rmtree("tiny")
    done = run("rank", "--profile", "run/profile.json", "--criterion", "rho", "--remove", "2")
    assert done.code == 0
    assert done.changed == {"run/plan.json"}
    plan, measured = PruningPlan.load("run/plan.json"), LayerProfile.load("run/profile.json")
    distance = abs(measured.contraction.rho - 1)
    assert plan.remove == tuple(sorted(distance.argsort()[:2].tolist()))


def test_prune_by_a_plan_removes_what_it_names(run: Callable[..., Done]) -> None:
    run("rank", "tiny", "--remove", "2", "-o", "run", *TEXT)
    done = run("prune", "tiny", "--plan", "run/plan.json", "-o", "out", *TEXT)
    assert done.code == 0, done.err
    assert "Removal gate: passed" in done.out
    plan = PruningPlan.load("run/plan.json")
    with torch.no_grad():
        ids = torch.arange(40).view(1, 40)
        wanted = remove_layers(AutoModelForCausalLM.from_pretrained("tiny"), plan.remove)(ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained("out")(ids).logits, wanted)


def test_eval_measures_both_models_on_the_same_tokens(run: Callable[..., Done]) -> None:
    run(*COMMANDS["prune"])
    done = run("eval", "out", "--against", "tiny", "-o", "run", *TEXT)
    assert done.code == 0, done.err
    dense, pruned = Evaluation.load("run/eval.json").perplexities
    assert dense.measured_on.text_hash == pruned.measured_on.text_hash
    assert dense.measured_on.split == "evaluation"
    assert (dense.measured_on.model.num_layers, pruned.measured_on.model.num_layers) == (6, 5)


def test_sensitivity_writes_its_result_the_profile_and_a_map(run: Callable[..., Done]) -> None:
    done = run("sensitivity", "tiny", "--study", "group,threshold", "--regret-limit", "3", "-o", "run", *TEXT)
    assert (done.code, done.err) == (0, "")
    assert {"run/sensitivity/profile.json", "run/sensitivity.json", "run/figures/sensitivity-map.svg"} <= done.changed
    result = Sensitivity.load("run/sensitivity.json")
    assert str(result) in done.out
    assert result.calibrated_on is not None
    assert {result.measured_on.split, result.calibrated_on.split} == {"evaluation", "calibration"}
    assert "Sensitivity" in Path("run/report.html").read_text(encoding="utf-8")


def test_sensitivity_why_measures_what_may_explain_it(run: Callable[..., Done]) -> None:
    arguments = ["sensitivity", "tiny", "--study", "removal", "--why", "-o", "run", *TEXT]
    done = run(*arguments)
    assert (done.code, done.err) == (0, "")
    assert {"run/activations.json", "run/jacobian.json"} <= done.changed
    assert not run(*arguments, "--resume").changed


INTERRUPTIBLE = {
    "sensitivity": (Sweep, "_measure", ["sensitivity", "tiny", "--study", "layer,removal", *TEXT]),
    "check": (checks_module, "_outcome", ["check", "tiny", "--tokens", "64", "--context", "32"]),
}


@pytest.mark.parametrize("name", INTERRUPTIBLE)
def test_an_interrupted_run_goes_on_where_it_stopped(
    name: str, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, arguments = INTERRUPTIBLE[name]
    work, calls, limit = getattr(owner, attribute), [0], [5]

    def counted(*args: Any, **kwargs: Any) -> Any:
        if calls[0] == limit[0]:
            raise KeyboardInterrupt
        calls[0] += 1
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, counted)
    whole = {"sensitivity": 13, "check": 30}[name]  # the dense model, six layers twice; thirty settings
    stopped = run(*arguments)
    assert stopped.code == 130
    assert (
        stopped.err
        == f"stopped; runs/tiny/jobs/{name} keeps what is finished, give the same line with --resume to go on\n"
    )
    limit[0] = whole
    done = run(*arguments, "--resume")
    assert (done.code, calls[0]) == (0, whole)
    again = run(*arguments, "--resume")
    assert (again.code, calls[0]) == (0, whole)
    assert again.out == done.out
    assert not again.changed
    limit[0] = whole + 1
    assert run(*arguments).code == 130  # without --resume the first job is done anew
    assert calls[0] == whole + 1


def test_resuming_on_other_text_is_refused(run: Callable[..., Done]) -> None:
    arguments = ["sensitivity", "tiny", "--study", "removal", "-o", "run"]
    assert run(*arguments, *TEXT).code == 0
    done = run(*arguments, "--tokens", "192", "--context", "64", "--resume")
    assert done.code == 2
    assert "run without --resume" in done.err


def test_report_draws_a_run_again(run: Callable[..., Done]) -> None:
    run("profile", "tiny", "-o", "run", *QUICK)
    Path("run/report.html").unlink()
    assert run("report", "run").changed == {"run/report.html"}


def test_the_cache_is_shown_and_emptied(
    run: Callable[..., Done],
    run_bad: Callable[..., str],
    reader: PreTrainedModel,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(place))
    assert run("cache").out == f"{place}: 0.00 GB of at most 20\n"
    write_gguf(reader, Path("x.gguf"))
    first, second = (run("profile", "x.gguf", "-o", "run", *QUICK) for _ in range(2))
    assert (first.code, first.out) == (second.code, second.out) == (0, first.out)
    done = run("cache")
    assert done.changed == set()
    assert done.out.splitlines()[1].endswith("  x.gguf")
    (model,) = json.loads(run("cache", "--json").out)["models"]
    assert model["source"] == "x.gguf"
    assert Path(model["folder"]).is_relative_to(place)
    assert "GB deleted" in run("cache", "--clear").out
    assert json.loads(run("cache", "--json").out)["models"] == []
    assert list(place.iterdir()) == []
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE_GB", "much")
    assert "LYAPUNOV_PRUNE_CACHE_GB is 'much'" in run_bad("cache")


# More that say something else in words: `out` is `tiny` with a layer less.
JSON = COMMANDS | {
    "rank --max-kl": ["rank", "tiny", "--criterion", "kl", "--max-kl", "1000", *TEXT],
    "compress --max-kl": ["compress", "tiny", "--method", "rtn", "--max-kl", "1000", "-o", "again", *TEXT],
    "prune --max-kl": ["prune", "tiny", "--criterion", "kl", "--max-kl", "1000", "-o", "again", *TEXT],
    "prune --on-disk": ["prune", "tiny", "--layers", "1", "--on-disk", "-o", "again"],
    "heal": ["heal", "out", "--teacher", "tiny", "--steps", "1", "-o", "healed", *TEXT],
    "eval --speed": ["eval", "out", "--against", "tiny", "--speed", *TEXT],
    "sensitivity --why": ["sensitivity", "tiny", "--study", "removal", "--why", *TEXT],
    "hierarchy": ["hierarchy", "tiny", "out", "--new-tokens", "1", "--tokens", "32", "--context", "16"],
    "report": ["report", "runs/tiny"],
    "theorems": ["theorems"],
    "cache": ["cache"],
}


@pytest.mark.usefixtures("healing_kept")
@pytest.mark.parametrize("name", JSON)
def test_json_is_one_document_and_nothing_else(name: str, run: Callable[..., Done]) -> None:
    if "out" in JSON[name][1:3]:
        run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT)
    if name == "report":
        run(*COMMANDS["profile"])
    done = run(*JSON[name], "--json")
    assert (done.code, done.err) == (0, "")
    assert isinstance(json.loads(done.out), dict)


def test_hierarchy_is_one_document_with_its_parts_by_name(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("items.jsonl").write_text('{"query": "one two", "choices": ["three", "four five"], "gold": 1}\n')
    run("compress", "tiny", "--method", "rtn", "--bits", "8", "-o", "rounded")
    few = ["--tokens", "32", "--context", "16", "--new-tokens", "2", "--choices", "items.jsonl", "--json"]
    done = run("hierarchy", "tiny", "rounded", *few)
    document = json.loads(done.out)
    assert list(document) == ["hierarchy", "generation", "diverged-history", "paths", "choices"]
    for name, part in document.items():
        assert part == json.loads(Path(f"runs/tiny/{name}.json").read_text())

    def unseen(*_: object, **__: object) -> NoReturn:
        raise LyapunovPruneError("its attention cannot be seen; take another")

    monkeypatch.setattr(attention_paths_module, "attention_paths", unseen)
    done = run("hierarchy", "tiny", "rounded", *few)
    assert (done.code, done.err) == (0, "no paths through attention: its attention cannot be seen; take another\n")
    assert list(json.loads(done.out)) == ["hierarchy", "generation", "diverged-history", "choices"]


def test_demo_is_one_document_with_its_parts_by_name(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    run(*COMMANDS["profile"])
    profile = LayerProfile.load("runs/tiny/profile.json")

    def run_demo(folder: Path, *, resume: bool, show: Callable[[str, Result], None]) -> Path:
        show("profile", profile)
        return folder / "report.html"

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    done = run("demo", "--json")
    assert json.loads(done.out) == {"profile": profile.to_json(), "report": "runs/demo/report.html"}
    assert str(profile) in run("demo").out


def test_a_violation_is_in_the_document_and_an_exit_code(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    certified = approx_module.certify
    monkeypatch.setattr(approx_module, "certify", lambda W: replace(certified(W), bound=certified(W).bound * 0.99))
    done = run(*COMMANDS["check"], "--json")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert json.loads(done.out) == json.loads(Path("runs/tiny/bounds.json").read_text())


# Bad models: every command that takes one says so.


def nan_in_layer_3(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("fault", ["truncated", "corrupt", "pickle only", "missing shard", "missing key", "no config"])
def test_a_broken_checkpoint(fault: str, command: list[str], run_bad: Callable[..., str], checkpoint: Path) -> None:
    BROKEN[fault][0](checkpoint)
    assert "tiny" in run_bad(*command)


def test_an_encoder(command: list[str], run_bad: Callable[..., str], checkpoint: Path) -> None:
    BertLMHeadModel(bert()).save_pretrained(checkpoint)
    assert "an encoder" in run_bad(*command)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_truncated_gguf_file(
    share: float,
    command: list[str],
    run_bad: Callable[..., str],
    reader: PreTrainedModel,
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
    path = write_gguf(reader, checkpoint.parent / "x.gguf")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert "x.gguf" in run_bad(*(a.replace("tiny", "x.gguf") for a in command))


@pytest.mark.parametrize("model", ["./absent", "a/b/c", "absent.gguf"])
def test_an_unknown_model(model: str, command: list[str], run_bad: Callable[..., str]) -> None:
    assert "; " in run_bad(*(a.replace("tiny", model) for a in command))


def test_a_hub_model_offline(
    command: list[str], run_bad: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [a.replace("tiny", "some-org/some-model-that-nobody-has") for a in command]
    assert "--offline" in run_bad(*command, "--offline")


@pytest.mark.parametrize("command", ["profile", "rank", "prune"], indirect=True)
def test_nan_activations_are_named_by_layer(command: list[str], run_bad: Callable[..., str], checkpoint: Path) -> None:
    nan_in_layer_3(checkpoint)
    assert "output of layer 3" in run_bad(*command)


def test_nan_activations_have_no_perplexity(run_bad: Callable[..., str], checkpoint: Path) -> None:
    nan_in_layer_3(checkpoint)
    assert "output of layer 3" in run_bad(*COMMANDS["eval"])


# Text of rows.


def test_what_is_read_of_rows_is_said_and_recorded(run: Any, checkpoint: Path) -> None:
    rows = [
        {"instruction": f"Say {n}", "output": f"so {n} be {n * n} it " * 9, "story": f"One {n} two. " * 9}
        for n in range(40)
    ]
    Path("x.json").write_text(json.dumps(rows))
    sparse = ("compress", "tiny", "--method", "wanda", "--sparsity", "0.5", *TEXT)
    for more, name in (([], "x.json (instruction, output, joined)"), (["--text-column", "story"], "x.json (story)")):
        done = run(*sparse, "--text", "x.json", *more, "-o", "out")
        assert done.code == 0, done.err
        assert f"Text: {name}\n" in done.err
        assert CompressionReport.load("out/compression.json").calibration.text == name
        assert run("eval", "out", *TEXT, "--text", "x.json", *more).code == 0
        assert f"made with {name}" in run("eval", "out", *TEXT, "--text", "x.json", *more, "--split", "all").err
        shutil.rmtree("out")
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained("tiny")
    assert "Text: x.json (instruction" in run("profile", "tiny", *QUICK, "--text", "x.json").err
    assert "--text-column" in run("profile", "tiny", *QUICK, "--text-column", "story").err


# Bad text.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"", "x.txt holds no text"),
        ("x.txt", b"short", "lower --tokens"),
        ("x.txt", b"caf\xe9 " * 999, "x.txt as UTF-8"),
        ("x.jsonl", b'{"text": 1}', "x.jsonl line 1"),
        ("y.txt", b"", "x.txt is no readable file"),
    ],
    ids=["empty", "short", "Latin-1", "JSONL", "missing"],
)
def test_a_bad_text(name: str, content: bytes, message: str, run_bad: Callable[..., str]) -> None:
    Path(name).write_bytes(content)
    assert message in run_bad(*COMMANDS["profile"], "--text", name.replace("y", "x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "129", "--tokens", "258"], "longer than the model's 128"),
        (["--tokens", "32"], "do not fill one window of 64"),
        (["--text", "org/set", "--offline"], "--offline"),
        (["--dtype", "float99"], "'float99' is not one of"),
        (["--device", "bogus"], "no device bogus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_common_option(options: list[str], message: str, command: list[str], run_bad: Callable[..., str]) -> None:
    assert message in run_bad(*command, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--derivative", "guess"], "'guess' is not one of"),
        (["--pooling", "mean"], "'mean' is not one of"),
        (["--epsilon", "0"], "epsilon > 0"),
        (["--epsilon", "nan"], "epsilon"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_of_profile(options: list[str], message: str, run_bad: Callable[..., str]) -> None:
    assert message in run_bad(*COMMANDS["profile"], *options)


# Bad choices of layers.


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (["--remove", "6"], "remove 6 of 6 layers"),
        (["--remove", "99"], "remove 99 of 6 layers"),
        (["--remove", "0"], "give 1 to 5"),
        (["--remove", "-1"], "give 1 to 5"),
        (["--layers", "3,3"], "layer 3 is named more than once"),
        (["--layers", "99"], "layer 99 does not exist"),
        (["--layers", "-1"], "layer -1 does not exist"),
        (["--layers", "0,1,2,3,4,5"], "keep at least one"),
        (["--layers", "a,b"], "--layers 'a,b' is no list of layers; write it as 3,7"),
        (["--layers", ""], "is no list of layers"),
        ([], "give --remove N, --max-kl X, --layers 3,7 or --plan FILE, one of the four"),
        (["--remove", "1", "--layers", "1"], "one of the four"),
        (["--remove", "1", "--criterion", "good"], "'good' is not one of 'rho', 'bi'"),
        (["--remove", "100%"], "a share of 100% of 6 layers cannot go; give less than 100%, as 25%"),
        (["--remove", "0%"], "a share of 0% of 6 layers cannot go"),
        (["--remove", "some"], "'some' is no number, as 7, and no share, as 25%"),
        (["--remove", "2.5"], "'2.5' is no number, as 7, and no share, as 25%"),
        (["--remove", "1", "--criterion", "bi", "--search", "9"], "--search is what --criterion best may spend; give"),
        (["--layers", "2", "--judge", "builtin"], "--judge is the text that --mend is judged by; give both or neither"),
        (["--max-kl", "1", "--criterion", "best"], "criterion best searches among sets; give --remove N with it"),
        (["--remove", "1", "--criterion", "best", "--what", "mlp"], "best is defined for whole layers only"),
        (["--remove", "1", "--protect", "0,x"], "--protect '0,x' is no list of layers; write it as 3,7"),
        (["--remove", "1", "--protect", "6"], "layer 6 to protect does not exist; the layers are 0 to 5"),
        (["--remove", "2", "--protect", "0,1,2,3,-1"], "1 layers are left to remove beside the protected, and 2"),
        (["--layers", "1", "--protect", "0"], "--protect is of layers that a criterion chooses; give --remove or"),
        (["--remove", "1", "--alpha", "1.5"], "alpha 1.5 is outside [0, 1]; give"),
        (["--plan", "absent.json"], "cannot read absent.json"),
        (["--plan", "tiny/config.json"], "tiny/config.json holds no result, not PruningPlan; give"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_choice_of_layers(choice: list[str], message: str, run_bad: Callable[..., str]) -> None:
    assert message in run_bad("prune", "tiny", "-o", "out", *choice, *TEXT)


@pytest.mark.parametrize(
    ("options", "criterion"),
    [
        (["--remove", "34%"], "best"),
        (["--remove", "2", "--criterion", "bi"], "bi"),
        (["--remove", "34%", "--what", "mlp"], "bi"),
    ],
)
def test_a_number_or_a_share_goes_by_best_if_no_criterion_is_given(
    options: list[str], criterion: str, run: Callable[..., Done]
) -> None:
    """In a plan as in a checkpoint; where best is not defined, by bi."""
    assert run("rank", "tiny", *options, "-o", "run", *TEXT).code == 0
    plan = PruningPlan.load("run/plan.json")
    assert (plan.criterion, len(plan.touched)) == (criterion, 2)
    done = run("prune", "tiny", *options, "-o", "out", *TEXT)
    assert done.code == 0, done.err
    assert Provenance.load("out/provenance.json").plan.touched == plan.touched
    assert ("too few to tell sets apart" in done.out) == (criterion == "best")


def test_an_order_without_a_number_is_by_bi(run: Callable[..., Done]) -> None:
    assert "by bi" in run("rank", "tiny", "-o", "run", *TEXT).out
    run("profile", "tiny", "-o", "run", *QUICK)
    assert "by bi" in run("rank", "--profile", "run/profile.json", "--remove", "25%").out


@pytest.mark.parametrize(
    "choice", [["--remove", "6"], ["--remove", "0"], ["--criterion", "good"], ["--alpha", "-1"]], ids=" ".join
)
@pytest.mark.parametrize("source", [["tiny"], ["--profile", "run/profile.json"]], ids=["model", "profile"])
def test_a_bad_choice_when_ranking(
    choice: list[str], source: list[str], run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    run("profile", "tiny", "-o", "run", *QUICK)
    run_bad("rank", *source, *TEXT, *choice)


@pytest.mark.parametrize("source", [[], ["tiny", "--profile", "x"]], ids=["neither", "both"])
def test_a_ranking_needs_a_model_or_a_profile(source: list[str], run_bad: Callable[..., str]) -> None:
    assert "or --profile FILE" in run_bad("rank", *source)


@pytest.mark.parametrize("cut", [10, -5])
def test_a_profile_cut_short(cut: int, run: Callable[..., Done], run_bad: Callable[..., str]) -> None:
    run("profile", "tiny", "-o", "run", *QUICK)
    path = Path("run/profile.json")
    path.write_text(path.read_text(encoding="utf-8")[:cut], encoding="utf-8")
    assert "not complete JSON" in run_bad("rank", "--profile", str(path))


@pytest.mark.parametrize("other", ["gpt2", "llama"])
def test_a_plan_made_for_another_model(
    other: str, run: Callable[..., Done], run_bad: Callable[..., str], checkpoint: Path
) -> None:
    run("rank", "tiny", "--remove", "1", "-o", "run", *TEXT)
    make_tiny(other, seed=1, vocab_size=len(VOCABULARY)).save_pretrained(checkpoint)
    line = run_bad("prune", "tiny", "--plan", "run/plan.json", "-o", "out", *TEXT)
    assert "made for tiny (llama, 6 layers), not for tiny" in line


def test_a_plan_for_another_model_is_refused_before_its_text_is_read(
    run: Callable[..., Done], run_bad: Callable[..., str], checkpoint: Path
) -> None:
    run("rank", "tiny", "--remove", "1", "-o", "run", *TEXT)
    make_tiny("gpt2", vocab_size=len(VOCABULARY), n_positions=32).save_pretrained(checkpoint)
    line = run_bad("prune", "tiny", "--plan", "run/plan.json", "-o", "out", *TEXT)
    assert "made for tiny (llama, 6 layers), not for tiny" in line


# Bad places, and disks.


@pytest.mark.parametrize("output", ["tiny", "tiny/config.json"], ids=["folder", "file"])
def test_an_output_that_is_not_empty(output: str, run_bad: Callable[..., str]) -> None:
    line = run_bad("prune", "tiny", "--remove", "1", "-o", output, *TEXT)
    told = {"tiny": "exists and is not empty"}
    assert f"{output} {told.get(output, 'is a file')}" in line


def test_empty_names_and_texts_are_named_as_such(run_bad: Callable[..., str], checkpoint: Path) -> None:
    (checkpoint.parent / "blank.txt").write_text("\n\n  \n" * 99)
    assert "the text has no name" in run_bad("eval", "tiny", "--text", "")
    assert "blank.txt holds no text" in run_bad("eval", "tiny", "--text", "blank.txt", *TEXT)
    assert "the model has no name" in run_bad("eval", "", *TEXT)


def test_what_is_decoded_has_to_fit_the_context_too(run_bad: Callable[..., str]) -> None:
    line = run_bad("hierarchy", "tiny", "--tokens", "128", "--context", "128", "--new-tokens", "2")
    assert "128 tokens and 2 behind them are more than the 128" in line


@pytest.mark.parametrize("name", ["profile", "rank", "eval"])
def test_an_output_that_is_a_file(name: str, run_bad: Callable[..., str]) -> None:
    assert "write in tiny/config.json" in run_bad(*COMMANDS[name], "-o", "tiny/config.json")


@pytest.mark.parametrize(
    "command",
    [
        ("heal", "tiny", "--teacher", "tiny"),
        ("joint", "tiny", "--remove", "1"),
        ("compress", "tiny", "--sparsity", "0.5", "--max-kl", "1"),
    ],
    ids=lambda command: command[0],
)
def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    command: tuple[str, ...], run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished work is kept under runs/ here, wherever the output is."""
    shutil.rmtree("tiny")
    access, here = os.access, Path.cwd()
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place).absolute() != here and access(place, mode))
    told = run_bad(*command, "-o", str(here.parent / "elsewhere/out"), *TEXT)
    assert "is not yours to write; run it from a folder that you may write" in told


def test_a_full_disk(command: list[str], run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    done = run(*command)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "No space left on device" in done.err
    assert not any(Path(path).is_file() for path in done.changed)


@pytest.mark.parametrize("folder", ["tiny", "absent", "tiny/config.json"])
def test_a_report_of_nothing(folder: str, run_bad: Callable[..., str]) -> None:
    assert f"{folder} holds no results" in run_bad("report", folder)


# The text that a model was chosen on.


@pytest.fixture
def text(checkpoint: Path) -> str:
    lines = (f"Line {n} of a text, and its number squared is {n * n}.\n\n" for n in range(200))
    (checkpoint.parent / "own.txt").write_text("".join(lines))
    return "own.txt"


@pytest.mark.parametrize("split", ["calibration", "all"])
@pytest.mark.parametrize("spelling", ["own.txt", "./own.txt", "tiny/../own.txt"])
def test_a_pruned_model_is_not_scored_on_its_calibration_text(
    split: str, spelling: str, text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    run(*COMMANDS["prune"], "--text", text)
    line = run_bad("eval", "out", *TEXT, "--text", spelling, "--split", split)
    assert f"out was made with {text} (calibration; step 1 of its history, prune), which holds about" in line
    assert f"tokens of {spelling} ({split}) to score; take its evaluation half, or another text" in line


def test_the_evaluation_half_is_not_offered_where_it_is_what_was_seen(
    text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    whole = Path(text).read_text()
    Path("second.txt").write_text(whole[whole.index("\n\n", len(whole) // 2) + 2 :])
    run(*COMMANDS["prune"], "--text", "second.txt")
    line = run_bad("eval", "out", *TEXT, "--text", text)
    assert line.rstrip().endswith("(evaluation) to score; give another text")


@pytest.mark.parametrize("options", [["--text", "own.txt"], ["--split", "all"]], ids=["other half", "other text"])
def test_a_pruned_model_is_scored_on_other_text(options: list[str], text: str, run: Callable[..., Done]) -> None:
    run(*COMMANDS["prune"], "--text", text)
    assert run("eval", "out", *TEXT, *options).code == 0


LONGER = ["--tokens", "512", "--context", "64"]
COMPRESS = ["compress", "--method", "magnitude", "--sparsity", "0.3"]
PRUNE = ["prune", "--remove", "1"]


def elsewhere() -> tuple[str, str]:
    Path("deep/er").mkdir(parents=True)
    os.chdir("deep/er")
    return "../../out", "../../own.txt"


def copied() -> tuple[str, str]:
    shutil.copy("own.txt", "copy.txt")
    return "out", "copy.txt"


def with_a_paragraph_more() -> tuple[str, str]:
    own = Path("own.txt").read_text()
    Path("more.txt").write_text("A paragraph that was added.\n\n" + own)
    return "out", "more.txt"


@pytest.mark.parametrize("moved", [elsewhere, copied, with_a_paragraph_more])
def test_the_calibration_text_is_known_by_its_content(
    moved: Callable[[], tuple[str, str]], text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    assert run(*PRUNE, "tiny", "-o", "out", *LONGER, "--text", text).code == 0
    model, where = moved()
    line = run_bad("eval", model, *LONGER, "--text", where, "--split", "calibration")
    assert f"{model} was made with {text} (calibration; step 1" in line
    assert f"{where} (calibration)" in line
    assert run("eval", model, *LONGER, "--text", where).code == 0


@pytest.mark.parametrize("allocation", ["owl", "lyapunov"])
def test_what_an_allocation_was_measured_on_was_seen(
    allocation: str, text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    run(*COMPRESS, "tiny", "--allocation", allocation, "-o", "out", *LONGER, "--text", text)
    assert CompressionReport.load("out/compression.json").calibration is None
    assert "history, compress" in run_bad("eval", "out", *LONGER, "--text", text, "--split", "calibration")
    assert f"Allocation: by tiny, float32 on cpu; 512 tokens of {text}" in Path("out/README.md").read_text()
    assert run("eval", "out", *LONGER, "--text", text).code == 0


@pytest.mark.parametrize(
    "how",
    [
        ["--method", "magnitude"],
        ["--method", "weight-only"],
        ["--method", "svd"],
        ["--method", "svd", "--format", "compact"],
        ["--method", "rtn"],
        ["--method", "magnitude", "--allocation", "atp"],
    ],
    ids=" ".join,
)
def test_the_text_of_a_budget_was_seen(
    how: list[str], text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    compress = ["compress", "tiny", "--max-kl", "0.5", "-o", "out", *LONGER, "--text", text, *how]
    assert run(*compress).code == 0
    assert "history, compress" in run_bad("eval", "out", *LONGER, "--text", text, "--split", "calibration")
    card = Path("out/README.md").read_text()
    assert re.search(rf"Allocation: by tiny, float32 on cpu; \d+ tokens of {re.escape(text)}", card)
    assert run("eval", "out", *LONGER, "--text", text).code == 0


def test_weights_alone_see_no_text(text: str, run: Callable[..., Done]) -> None:
    run(*COMPRESS, "tiny", "-o", "out")
    assert run("eval", "out", *LONGER, "--text", text, "--split", "calibration").code == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PRUNE, COMPRESS),
        (["compress", "--method", "wanda", "--sparsity", "0.3"], ["prune", "--layers", "0"]),
        (PRUNE, ["prune", "--layers", "0"]),
        (PRUNE, ["prune", "--layers", "0", "--on-disk"]),
        ([*COMPRESS, "--allocation", "owl"], ["prune", "--layers", "0", "--on-disk"]),
        (PRUNE, ["heal", "--steps", "1", "--teacher", "tiny"]),
    ],
    ids=lambda options: " ".join(options[::2]),
)
def test_a_second_step_keeps_what_the_first_saw(
    first: list[str], second: list[str], text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    assert run(*first, "tiny", "-o", "out", *LONGER, "--text", text).code == 0
    reads = [] if "--on-disk" in second or second == COMPRESS else LONGER
    assert run(*second, "out", "-o", "again", *reads).code == 0
    assert [step.kind for step in History.load("again/history.json").steps] == [first[0], second[0]]
    line = run_bad("eval", "again", *LONGER, "--text", text, "--split", "calibration")
    assert f"made with own.txt (calibration; step 1 of its history, {first[0]})" in line
    assert run("eval", "again", *LONGER, "--text", text).code == 0


def test_hierarchy_and_sensitivity_ask_the_history_too(text: str, run: Callable[..., Done]) -> None:
    halves = "".join(Path(text).read_text().partition("Line 100 ")[::2][::-1])  # the other half first
    Path("turned.txt").write_text(halves)
    run(*PRUNE, "tiny", "-o", "out", *LONGER, "--text", text)
    for command in (["hierarchy", "tiny", "out", "--new-tokens", "1"], ["sensitivity", "out", "--study", "removal"]):
        done = run(*command, *LONGER, "--text", "turned.txt")
        assert done.code == 2, command
        assert "made with own.txt (calibration" in done.err
        assert "turned.txt (evaluation)" in done.err


def test_an_unknown_split(run_bad: Callable[..., str]) -> None:
    told = run_bad(*COMMANDS["eval"], "--split", "test")
    assert "'test' is not one of 'evaluation', 'all', 'calibration'" in told


# A failed check, usage, interruption.


def test_a_failed_gate_is_exit_code_1_and_nothing_written(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrongly(model: PreTrainedModel, plan: PruningPlan, *more: Any, **how: Any) -> PreTrainedModel:
        pruned = cut(model, plan)
        wrong_layer_idx(pruned)
        return pruned

    monkeypatch.setattr(checkpoint_module, "cut", wrongly)
    done = run(*COMMANDS["prune"], "--criterion", "bi")
    assert done.code == 1
    assert done.err.startswith("error: nothing written: the pruned model fails the gate, cached decoding: ")
    assert (done.err.count("\n"), done.out, done.changed) == (1, "", set())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["unknown"], "'unknown'"),
        (["--unknown"], "--unknown"),
        (["profile"], "Missing argument 'model'"),
        (["prune", "tiny"], "Missing option '--output'"),
        (["prune", "tiny", "-o"], "requires an argument"),
        (["profile", "tiny", "extra"], "extra"),
        (["profile", "tiny", "--tokens", "many"], "'--tokens'"),
        (["profile", "tiny", "--tokens", "1"], "'--tokens'"),
        (["profile", "tiny", "--seeds", "0"], "'--seeds'"),
        (["profile", "tiny", "--batch-size", "0"], "'--batch-size'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_usage_error(arguments: list[str], message: str, run_bad: Callable[..., str]) -> None:
    line = run_bad(*arguments)
    assert message in line
    assert line.endswith("; see lyapunov-prune COMMAND --help\n")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["prune", "--help"]], ids=" ".join)
def test_help_is_no_error(arguments: list[str], run: Callable[..., Done]) -> None:
    done = run(*arguments)
    assert (done.code, done.err, done.changed) == (0, "", set())
    assert "Usage: lyapunov-prune" in done.out


def test_a_full_gpu_is_one_line(run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore lines.")

    monkeypatch.setattr(loading, "load", load)
    line = run_bad(*COMMANDS["profile"])
    assert line == "error: CUDA out of memory; lower --batch-size or --context, or give --device cpu\n"


def test_an_interruption_is_exit_code_130(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "cut", interrupt)
    done = run(*COMMANDS["prune"])
    assert (done.code, done.changed) == (130, set())
    assert done.err == "stopped; nothing is kept of what was not finished\n"


def test_compress_writes_a_plain_checkpoint_that_says_what_it_is(run: Any) -> None:
    done = run("compress", "tiny", "--method", "wanda", "--pattern", "2:4", "-o", "out", *TEXT)
    assert done.code == 0
    assert "neither memory nor time is saved" in done.out
    AutoModelForCausalLM.from_pretrained("out")
    assert Path("out/compression.json").is_file()
    assert run("eval", "out", "--split", "calibration", *TEXT).code == 2  # its calibration text
    done = run("eval", "out", "--against", "tiny", *TEXT)
    assert done.code == 0
    assert "50% of the entries are zero" in done.out


def test_an_allocation_is_measured_or_read(run: Any) -> None:
    sparse = ["compress", "tiny", "--method", "magnitude", "-o"]
    assert run(*sparse, "a", "--sparsity", "0.5", "--allocation", "lyapunov", *TEXT).code == 0
    allocation = CompressionReport.load("a/compression.json").allocation
    allocation.save("allocation.json")
    assert run(*sparse, "b", "--allocation", "allocation.json").code == 0
    a, b = (load_file(f"{name}/model.safetensors") for name in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_every_knob_of_a_schedule_is_reached(run: Any) -> None:
    sparse = ["compress", "tiny", "--method", "magnitude", "--sparsity", "0.5", *TEXT]
    steps = ["--schedule-option", "least=0.9", "--schedule-option", "most=1.05", "--pooling", "token"]
    assert run(*sparse, "--allocation", "lyapunov", *steps, "-o", "a").code == 0
    found = CompressionReport.load("a/compression.json").allocation
    assert (found.parameters, found.pooling) == ({"least": 0.9, "most": 1.05}, "token")
    other = ["--allocation", "lyapunov-budget", "--schedule-option", "reading=downstream"]
    assert run(*sparse, *other, "-o", "b").code == 0
    found = CompressionReport.load("b/compression.json").allocation
    assert (found.parameters, found.pooling) == ({"reading": "downstream"}, "energy")
    assert run(*sparse, "--allocation", "atp-search", "--schedule-option", "trials=2", "-o", "c").code == 0
    assert len(CompressionReport.load("c/compression.json").allocation.tried) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--allocation", "atp", "--schedule-option", "tau=1"], "parameter 'tau'"),
        (["--allocation", "atp", "--schedule-option", "beta"], "'beta' is no NAME=VALUE"),
        (["--allocation", "atp", "--schedule-option", "beta=steep"], "is 'steep'"),
        (["--allocation", "atp", "--pooling", "token"], "leave out --pooling"),
    ],
)
def test_a_knob_that_is_none_is_refused_before_the_model_loads(run: Any, args: list[str], message: str) -> None:
    done = run("compress", "none", "-o", "out", "--method", "magnitude", "--sparsity", "0.5", *args)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--method", "wanda", "--pattern", "2-4"], "write it as 2:4"),
        (["--method", "wanda", "--bits", "4"], "takes sparsity"),
        (["--method", "wanda", "--sparsity", "0.5", "--allocation", "none.json"], "unknown allocation"),
        (["--method", "best", "--sparsity", "0.5"], "'best' is not one of 'magnitude'"),
        (["--method", "magnitude", "--sparsity", "0.5"], "--tokens has no effect"),
        (["--method", "rtn", "--bits", "4"], "--tokens has no effect"),
        (["--method", "wanda", "--sparsity", "0"], "--sparsity 0 removes nothing"),
        (["--method", "rtn", "--bits", "4", "--allocation", "bits"], "gives every layer 4 bits"),
        (
            ["--method", "rtn", "--bits", "6", "--allocation", "bits", "--schedule-option", "high=6"],
            "gives every layer 6 bits; give a mean between 4 and 6",
        ),
    ],
)
def test_compress_refuses_before_it_loads(run: Any, args: list[str], message: str) -> None:
    done = run("compress", "tiny", "-o", "out", *args, *TEXT)
    assert done.code == 2
    assert message in done.err
    assert not done.changed


def test_criteria_that_look_at_the_predictions(run: Any) -> None:
    assert run("rank", "tiny", "--criterion", "kl", "--remove", "2", *TEXT).code == 0
    assert PruningPlan.load("runs/tiny/plan.json").criterion == "kl"
    assert Path("runs/tiny/divergence.json").is_file()
    assert run("prune", "tiny", "--criterion", "oracle", "--remove", "2", "-o", "out", *TEXT).code == 0
    by_hand = run("rank", "tiny", "--criterion", "oracle", "--remove", "2", "--resume", *TEXT)
    assert by_hand.code == 0
    assert PruningPlan.load("runs/tiny/plan.json").remove == Provenance.load("out/provenance.json").plan.remove
    done = run("rank", "tiny", "--criterion", "oracle", *TEXT)
    assert done.code == 2
    assert "give --remove N" in done.err
    assert "scores of criterion kl" in run("rank", "--profile", "x.json", "--criterion", "kl").err


def test_the_best_of_all_criteria_within_a_budget(run: Any) -> None:
    asked = (
        "tiny",
        "--criterion",
        "best",
        "--search",
        "9",
        "--remove",
        "2",
        "--protect",
        "-1,0",
        *TEXT,
        "--context",
        "16",
    )
    assert run("rank", *asked).code == 0
    found = BestRemoval.load("runs/tiny/best.json")
    assert found.forwards <= 9
    assert found.protected == (0, 5)
    assert "The best of many choices" in (run("report", "runs/tiny") and Path("runs/tiny/report.html").read_text())
    done = run("prune", *asked, "-o", "out")
    assert done.code == 0
    assert "told apart from" in done.out.lower()
    assert Provenance.load("out/provenance.json").plan.remove == found.remove
    assert run("rank", *asked, "--resume").code == 0
    assert BestRemoval.load("runs/tiny/best.json").remove == found.remove
    small = run("rank", *asked, "--search", "1")
    assert (small.code, small.changed) == (2, set())
    assert "1 forwards" in small.err


def test_a_run_of_layers_goes_as_one(run: Any) -> None:
    assert run("rank", "tiny", "--criterion", "angular", "--remove", "2", *TEXT).code == 0
    plan = PruningPlan.load("runs/tiny/plan.json")
    assert plan.remove == (plan.remove[0], plan.remove[0] + 1)
    assert run("prune", "tiny", "--criterion", "angular", "--remove", "2", "-o", "out", *TEXT).code == 0
    assert Provenance.load("out/provenance.json").plan.remove == plan.remove
    assert "give --remove N" in run("rank", "tiny", "--criterion", "angular", *TEXT).err
    periods = ("--remove", "2", "--keep-period", "-o", "no")
    assert "--keep-period" in run("prune", "tiny", "--criterion", "angular", *periods, *TEXT).err


@pytest.mark.usefixtures("healing_kept")
def test_a_pruned_model_is_healed_by_the_one_it_came_from(run: Any) -> None:
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    done = run(
        "heal",
        "out",
        "-o",
        "healed",
        "--teacher",
        "tiny",
        "--steps",
        "3",
        "--update-rank",
        "2",
        "--text",
        "builtin",
        *TEXT,
    )
    assert done.code == 0
    report = Healing.load("healed/healing.json")
    assert (report.steps, report.rank) == (3, 2)
    assert not list(Path("runs").rglob("jobs/*"))
    assert Provenance.load("healed/provenance.json").plan.remove == (1, 3)
    AutoModelForCausalLM.from_pretrained("healed")
    assert "--teacher" in run("heal", "tiny", "-o", "again", "--steps", "1", *TEXT).err
    assert run("eval", "healed", "--split", "calibration", *TEXT).code == 2


def test_where_nothing_beats_the_pruned_model_nothing_is_written(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Healing, "kept", -1)
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    heal = ("heal", "out", "-o", "healed", "--teacher", "tiny", "--minutes", "0.01", *TEXT)
    for more in ((), ("--update-rank", "2"), ("--json",)):
        done = run(*heal, *more)
        assert done.code == 1
        assert "healed was not written" in done.err
        assert not Path("healed").exists()
        assert not list(Path("runs").rglob("jobs/*"))
        if more == ("--json",):
            assert json.loads(done.out)["kind"] == "Healing"
        else:
            assert "Nothing kept" in done.out


@pytest.mark.usefixtures("healing_kept")
def test_half_precision_is_healed_by_updates_of_low_rank(run: Any, run_bad: Any) -> None:
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    heal = ("heal", "out", "-o", "healed", "--teacher", "tiny", "--steps", "2", "--dtype", "bfloat16", *TEXT)
    assert "--update-rank" in run_bad(*heal)
    done = run(*heal, "--update-rank", "2", "--checkpointing")
    assert done.code == 0, done.err
    assert AutoModelForCausalLM.from_pretrained("healed").dtype == torch.bfloat16


def test_layers_are_shared_out_by_several_processes_only(run_bad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load", pytest.fail)
    heal = ("heal", "out", "-o", "healed", "--teacher", "tiny", "--shard", *TEXT)
    assert "accelerate launch" in run_bad(*heal)
    assert "--update-rank or --shard" in run_bad(*heal, "--update-rank", "2")


def test_a_strangers_provenance_does_not_choose_what_is_loaded(
    run: Any, run_bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT)
    made = Path("out/provenance.json")
    content = json.loads(made.read_text())
    for source in ("tiny", "someone/large", "/etc", "\x1b[2J\nerror: no"):
        made.write_text(json.dumps(content | {"source": source}))
        monkeypatch.setattr(loading, "load", pytest.fail)
        told = run_bad("heal", "out", "-o", "healed", "--steps", "1", *TEXT)
        assert f"was made from {source!r}" in told
        assert "\x1b" not in told


@pytest.mark.usefixtures("healing_kept")
def test_the_built_in_model_teaches_without_being_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT)
    made = Path("out/provenance.json")
    made.write_text(json.dumps(json.loads(made.read_text()) | {"source": loading.BUILTIN}))
    monkeypatch.setattr(loading, "builtin_folder", lambda: Path("tiny"))
    assert run("heal", "out", "-o", "healed", "--steps", "1", *TEXT).code == 0


def test_a_teacher_of_other_weights_than_those_pruned_is_refused(run: Any, run_bad: Any) -> None:
    run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT)
    shutil.copytree("tiny", "tuned")
    weights = load_file("tuned/model.safetensors")
    weights["model.layers.4.mlp.up_proj.weight"][3, 3] += 0.01
    save_file(weights, "tuned/model.safetensors", {"format": "pt"})
    told = run_bad("heal", "out", "-o", "healed", "--teacher", "tuned", "--steps", "1", *TEXT)
    assert "out/provenance.json records as 'tiny'" in told


def test_models_that_read_text_otherwise_are_not_compared(run: Any, run_bad: Any) -> None:
    shutil.copytree("tiny", "other")
    names = VOCABULARY[:3] + VOCABULARY[-2:2:-1] + VOCABULARY[-1:]
    content = json.loads(Path("tiny/tokenizer.json").read_text())
    content["model"]["vocab"] = {name: i for i, name in enumerate(names)}
    Path("other/tokenizer.json").write_text(json.dumps(content))
    for command in (
        ("eval", "tiny", "--against", "other"),
        ("hierarchy", "other", "tiny"),
        ("check", "other", "tiny"),
        ("heal", "tiny", "--teacher", "other", "-o", "healed"),
    ):
        told = run_bad(*command, *TEXT)
        assert "(token '!' has id 258 and id 3)" in told


@pytest.mark.usefixtures("healing_kept")
def test_a_pruned_model_learns_from_what_the_dense_one_writes(run: Any) -> None:
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    done = run("heal", "out", "-o", "healed", "--teacher", "tiny", "--steps", "2", *TEXT)
    assert done.code == 0, done.err
    report = Healing.load("healed/healing.json")
    assert report.measured_on.text.startswith("written by")
    assert report.held_out is not None
    assert report.held_out.after.measured_on.split == "evaluation"


@pytest.mark.usefixtures("healing_kept")
def test_another_text_judges_what_is_healed(run: Any) -> None:
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    heal = ("heal", "out", "--teacher", "tiny", "--steps", "2", "--tokens", "512", "--context", "64")
    assert run(*heal, "-o", "healed", "--judge", "builtin").code == 0
    report = Healing.load("healed/healing.json")
    assert report.measured_on.text.startswith("written by")
    assert (report.judged_on.text.partition(",")[0], len(report.judged)) == ("builtin", 1)


@pytest.mark.usefixtures("healing_kept")
def test_a_healed_model_is_scored_as_eval_scores_it(run: Any) -> None:
    config = json.loads(Path("tiny/config.json").read_text())
    Path("tiny/config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    heal = ("heal", "out", "--teacher", "tiny", "--steps", "2", "--tokens", "512")
    for more, learnt, scored in ([], 256, 512), (["--context", "128"], 128, 128):
        assert run(*heal, *more, "-o", f"healed-{scored}").code == 0
        report = Healing.load(f"healed-{scored}/healing.json")
        assert report.held_out is not None
        assert (report.measured_on.context, report.held_out.after.measured_on.context) == (learnt, scored)


@pytest.mark.usefixtures("healing_kept")
def test_two_ways_to_heal_one_model_run_side_by_side(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins where the other has a state, and is killed: each goes on from its own."""
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    heal = ("heal", "out", "--teacher", "tiny", "--update-rank", "2", *TEXT)
    take_step = Distillation.take_step

    def killed(self: Distillation, window: torch.Tensor, rate: float) -> None:
        if self.step == 2:
            raise KeyboardInterrupt
        take_step(self, window, rate)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "take_step", killed)
        patch.setattr(training_state, "SECONDS", 0.0)
        patch.setattr(training_state, "_SHARE", math.inf)
        for output, steps in (("a", "3"), ("b", "4"), ("./c/a", "5")):
            assert run(*heal, "-o", output, "--steps", steps).code == 130
    taken: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "take_step", lambda self, *a: (taken.append(self.step), take_step(self, *a)))
        for output, steps in (("c/a", "5"), ("a", "3"), ("b", "4")):
            assert run(*heal, "-o", output, "--steps", steps, "--resume").code == 0
            assert Healing.load(f"{output}/healing.json").steps == int(steps)
    assert taken == [2, 3, 4, 2, 2, 3]
    assert not list(Path("runs").rglob("jobs/*"))


def test_heal_looks_at_the_disk_before_it_trains(
    run: Any, run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    heal = ("heal", "out", "--teacher", "tiny", "--steps", "2", "-o", "healed", *TEXT)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**5))
    assert "files of the healed model" in run_bad(*heal)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("healing_kept")
def test_a_full_disk_leaves_what_was_trained_and_says_so(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    heal = ("heal", "out", "--teacher", "tiny", "--steps", "2", "-o", "healed", *TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", disk_full)
        done = run(*heal)
    assert done.code == 2
    assert "give --resume" in done.err
    monkeypatch.setattr(Distillation, "take_step", lambda *_: pytest.fail("it was trained already"))
    assert run(*heal, "--resume").code == 0


def test_a_second_run_in_a_folder_at_work_is_refused_in_one_line(run: Any, run_bad: Callable[..., str]) -> None:
    assert run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT).code == 0
    jobs = Path("runs/out/jobs") / f"heal-{folder_name(str(Path('healed').resolve()))}"
    with TrainingState(jobs, {}) as state, Store("runs/tiny/jobs/sensitivity", "sweep", {}) as store:
        state.hold()
        store.add("a", 1)
        assert "another run is at work in runs/out" in run_bad(
            "heal", "out", "--teacher", "tiny", "-o", "healed", "--steps", "1", *TEXT
        )
        for resume in ([], ["--resume"]):
            assert "another run is at work in runs/tiny" in run("sensitivity", "tiny", *TEXT, *resume).err
        assert store.items() == {"a": 1}


def test_two_models_never_share_a_run_folder(run: Any) -> None:
    for name in ("a/b", "a-b"):
        shutil.copytree("tiny", name)
        assert run("profile", name, *QUICK).code == 0
    found = [LayerProfile.load(path).contraction.measured_on.model.name for path in Path("runs").glob("*/profile.json")]
    assert sorted(found) == ["a-b", "a/b"]
    assert Path("runs/a-b/profile.json").is_file()


def test_names_of_run_folders() -> None:
    for name in ("smollm2-135m", "gpt2", "Llama-3.2-1B", "tiny_model", "größe"):
        assert folder_name(name) == name
    names = ["a/b", "a-b", "a--b", "a b", "/a/b", "-a-b", "a/b/", "a-b.", "a.b", ".", "..", "../a-b", "./a-b", "~/a-b"]
    names += [folder_name("a/b"), folder_name(folder_name("a/b")), folder_name("."), "x" * 300, "y/" + "x" * 300]
    found = {folder_name(name) for name in names[:-2]} | {folder_name("y/" + "x" * 300)}
    assert len(found) == len(names) - 1
    assert all(re.fullmatch(r"\w[\w.-]{0,120}", name) for name in found)


def test_the_budget_of_divergence_says_how_many_layers_go(run: Any) -> None:
    kl = ("tiny", "--criterion", "kl", *TEXT)
    assert run("rank", *kl, "--max-kl", "1000").code == 0
    assert len(PruningPlan.load("runs/tiny/plan.json").remove) == 5  # one layer stays
    assert "raise the budget" in run("rank", *kl, "--max-kl", "1e-9").err
    spent = BudgetedRemoval.load("runs/tiny/budget.json")
    assert run("prune", *kl, "--max-kl", str(spent.kl[0]), "-o", "out").code == 0
    assert Provenance.load("out/provenance.json").plan.remove == spent.ranking.order[:1]
    assert run("rank", "tiny", "--criterion", "bi", *TEXT, "--max-kl", "1000").code == 0
    assert "--max-kl says how many" in run("rank", *kl, "--max-kl", "1", "--remove", "2").err
    assert "removes nothing" in run("prune", *kl, "--max-kl", "0", "-o", "no").err
    assert "give --remove N" in run("rank", "tiny", "--criterion", "oracle", "--max-kl", "1", *TEXT).err


def test_the_budget_of_divergence_is_spent_on_parts_of_layers_too(run: Any) -> None:
    bi = ("tiny", "--criterion", "bi", "--what", "mlp", *TEXT)
    assert run("rank", *bi, "--max-kl", "1000").code == 0
    assert len(PruningPlan.load("runs/tiny/plan.json").drop_mlp) == 6  # every layer stays
    spent = BudgetedRemoval.load("runs/tiny/budget.json")
    assert run("prune", *bi, "--max-kl", str(spent.kl[0]), "-o", "out").code == 0
    assert Provenance.load("out/provenance.json").plan.drop_mlp == spent.ranking.order[:1]
    assert "orders activations" in run("prune", *bi[:3], "--what", "activation", "--max-kl", "1", "-o", "no").err
    assert (
        "blend is defined for whole layers"
        in run("prune", "tiny", "--criterion", "blend", "--what", "mlp", "--max-kl", "1", "-o", "no").err
    )


def test_compress_takes_what_a_budget_of_divergence_allows(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rtn = ("compress", "tiny", "--method", "rtn", *TEXT)
    with monkeypatch.context() as patch:  # what is written is the model that was tried
        patch.setattr(sys.modules["lyapunov_prune.compression.compress"], "compress", None)
        assert run(*rtn, "--max-kl", "1000", "-o", "out").code == 0
    spent = BudgetedCompression.load("out/amounts.json")
    assert (spent.amount, spent.max_kl) == (2, 1000)
    assert {m.bits for m in CompressionReport.load("out/compression.json").matrices} == {2}
    assert "the least it takes, costs" in run(*rtn, "--max-kl", "1e-30", "-o", "no").err
    assert "removes nothing" in run(*rtn, "--max-kl", "0", "-o", "no").err
    for said in (("--bits", "4"), ("--sparsity", "0.5"), ("--rank", "2"), ("--pattern", "2:4")):
        assert f"leave out {said[0]}" in run(*rtn, "--max-kl", "1", *said, "-o", "no").err
    assert "--resume" in run(*rtn, "--bits", "4", "--resume", "-o", "no").err
    assert not Path("no").exists()


def test_hierarchy_follows_a_compressed_and_a_pruned_model(run: Any) -> None:
    few = ["--tokens", "32", "--context", "16", "--new-tokens", "3"]
    assert run("compress", "tiny", "--method", "rtn", "--bits", "8", "-o", "rounded").code == 0
    Path("items.jsonl").write_text('{"query": "one two", "choices": ["three", "four five"], "gold": 1}\n' * 3)
    assert "give COMPRESSED too" in run("hierarchy", "tiny", "--choices", "items.jsonl").err
    assert "--choices FILE" in run("hierarchy", "tiny", "rounded", "--letters").err
    asked = ["--choices", "items.jsonl", "--letters", "--limit", "2", "--sample", "0"]
    assert run("hierarchy", "tiny", "rounded", *asked, *few).code == 0
    assert ChoiceComparison.load("runs/tiny/letters.json").characters[0] == (1.0, 1.0)
    assert "Multiple choice by letters" in Path("runs/tiny/report.html").read_text()
    assert "Generation by draws" in Path("runs/tiny/report.html").read_text()
    assert GenerationDivergence.load("runs/tiny/sampled.json").measured_on.seed == 0
    written = {p.name for p in Path("runs/tiny").iterdir()}
    assert {
        "hierarchy.json",
        "generation.json",
        "diverged-history.json",
        "paths.json",
        "choices.json",
        "report.html",
    } <= written
    assert len(ChoiceComparison.load("runs/tiny/choices.json").gold) == 2
    rounded = HierarchyProbe.load("runs/tiny/hierarchy.json")
    assert run("hierarchy", "tiny", *few).code == 0
    dropped = HierarchyProbe.load("runs/tiny/hierarchy.json")
    assert rounded.kl.mean() < dropped.kl.mean()
    assert run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT).code == 0
    done = run("hierarchy", "tiny", "out", *few)
    assert done.code == 0
    assert "One layer of tiny left out, by itself" in done.out
    assert "out has 5 of 6 layers" in done.out


def test_hierarchy_refuses_what_was_not_made_from_the_dense_model(
    run: Any, run_bad: Any, checkpoint: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    few = ["--tokens", "32", "--context", "16", "--new-tokens", "1"]
    for name, changes, told in (
        ("gpt2", {}, "(gpt2, not llama)"),
        ("llama", {"hidden_size": 64}, "(64, not 32)"),
    ):
        model = make_tiny(name, vocab_size=len(VOCABULARY), **changes)
        saved(cut(model, (1,)), tokenizer, checkpoint.parent / "other")
        assert told in run_bad("hierarchy", "tiny", "other", *few)
        shutil.rmtree("other")
    saved(make_tiny("llama", seed=1, vocab_size=len(VOCABULARY)), tokenizer, checkpoint.parent / "stranger")
    assert run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT).code == 0
    assert run("prune", "out", "--layers", "1", "-o", "twice", *TEXT).code == 0
    told = run_bad("hierarchy", "stranger", "out", *few)
    assert "out/provenance.json records as 'tiny'" in told
    assert run("hierarchy", "tiny", "twice", *few).code == 0


def test_hierarchy_decodes_each_text_once_and_by_the_batch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what generation walks through both models."""
    assert run("compress", "tiny", "--method", "rtn", "--bits", "8", "-o", "rounded").code == 0
    walk = decoding.walk
    walks: list[tuple[str, int]] = []

    def counted(reading: Any, prompts: torch.Tensor, *args: Any, **given: Any) -> Any:
        walks.append((reading.model.config._name_or_path, len(prompts)))
        return walk(reading, prompts, *args, **given)

    for module in (decoding, generation_module):
        monkeypatch.setattr(module, "walk", counted)
    few = ["--tokens", "64", "--context", "16", "--new-tokens", "3", "--batch-size", "2"]
    assert run("hierarchy", "tiny", "rounded", *few).code == 0
    assert Counter(walks) == {("tiny", 2): 4, ("rounded", 2): 4}  # four prompts, twice


def test_eval_scores_retrieval(run: Any) -> None:
    Path("queries.jsonl").write_text('{"_id": "q", "text": "one two"}\n')
    Path("docs.jsonl").write_text("".join(f'{{"_id": "d{i}", "text": "three {i}"}}\n' for i in range(12)))
    Path("qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td3\t1\n")
    assert run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT).code == 0
    asked = ["--retrieval", "queries.jsonl,docs.jsonl,qrels.tsv", "--against", "tiny", *TEXT]
    done = run("eval", "out", *asked)
    assert done.code == 0
    assert "1 queries, 12 documents" in done.out
    found = Evaluation.load("runs/out/eval.json").retrieval
    assert found is not None
    assert found.models == ("tiny", "out")
    assert "<h2>Retrieval</h2>" in Path("runs/out/report.html").read_text()
    for files in ("queries.jsonl", "a,b,c,d", "a,"):
        assert "two or three files" in run("eval", "tiny", "--retrieval", files).err
    assert "cannot read" in run("eval", "tiny", "--retrieval", "queries.jsonl,docs.jsonl").err  # no qrels/test.tsv


def test_hierarchy_gives_a_verdict_by_kind_of_task(run: Any) -> None:
    Path("items.jsonl").write_text('{"query": "one two", "choices": ["three", "four five"], "gold": 1}\n' * 3)
    Path("queries.jsonl").write_text('{"_id": "q", "text": "one two"}\n')
    Path("docs.jsonl").write_text("".join(f'{{"_id": "d{i}", "text": "three {i}"}}\n' for i in range(12)))
    Path("qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td3\t1\n")
    few = ["--tokens", "32", "--context", "16", "--new-tokens", "3"]
    asked = ["--choices", "items.jsonl", "--retrieval", "queries.jsonl,docs.jsonl,qrels.tsv", "--verdict", *few]
    for option in (["--verdict"], ["--retrieval", "a,b"], ["--sample", "0"]):
        assert f"{option[0]} compares two models" in run("hierarchy", "tiny", *option).err
    assert run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT).code == 0
    done = run("hierarchy", "tiny", "out", *asked)
    assert done.code == 0
    found = Verdict.load("runs/tiny/verdict.json")
    assert [k.task for k in found.kinds] == ["retrieval", "choice", "generation"]
    assert "generation: " in done.out
    page = Path("runs/tiny/report.html").read_text()
    assert page.index("<h2>Verdict by kind of task</h2>") < page.index("<h2>Hidden state, logits, probabilities</h2>")
    assert "<h2>Retrieval with both models</h2>" in page


def test_hierarchy_goes_on_from_own_prompts(run: Any) -> None:
    Path("mine.txt").write_text("one two three\nthe thick ether\nfour\n")
    few = ["--prompts", "mine.txt", "--new-tokens", "3"]
    done = run("hierarchy", "tiny", *few)
    assert done.code == 0
    assert "tokens of mine.txt (all" in done.out
    assert HierarchyProbe.load("runs/tiny/hierarchy.json").kl.shape[-1] == 3
    assert "no chat template" in run("hierarchy", "tiny", *few, "--chat").err
    assert "--prompts FILE" in run("hierarchy", "tiny", "--chat").err
    Path("long.txt").write_text("a long prompt " * 200)
    assert "context is 128" in run("hierarchy", "tiny", "--prompts", "long.txt").err
    assert "no.txt" in run("hierarchy", "tiny", "--prompts", "no.txt").err


@pytest.mark.parametrize("command", ["rank", "prune"])
@pytest.mark.parametrize("criterion", ["rho", "blend"])
def test_rho_of_nothing_but_rounding_decides_nothing(
    command: str, criterion: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    asked = [command, "tiny", "--criterion", criterion, "--remove", "1", "-o", "out", *TEXT]
    assert "rounding floor of bfloat16" in run_bad(*asked, "--dtype", "bfloat16")
    assert run(*asked).code == 0
