"""What the commands write, and where."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import COMMANDS, QUICK, TEXT, Done, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lyapunov_prune.bounds import approximation as approx_module
from lyapunov_prune.bounds.report import BoundsReport
from lyapunov_prune.cli.inputs import folder_name
from lyapunov_prune.compression.report import CompressionReport
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import remove_layers
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

# What the commands write.


@pytest.mark.usefixtures("drawn")
def test_profile_writes_its_result_and_the_report(run: Callable[..., Done]) -> None:
    done = run("profile", "tiny", "-o", "run", *QUICK)
    assert (done.code, done.err) == (0, "")
    assert {"run/profile.json", "run/report.html", "run/figures/contraction.svg"} <= done.changed
    assert "\n".join(LayerProfile.load("run/profile.json").answer()) in done.out


def test_results_go_to_a_folder_named_after_the_model(run: Callable[..., Done]) -> None:
    assert "runs/tiny/profile.json" in run(*COMMANDS["profile"]).changed


def test_check_writes_every_matrix_and_setting(run: Callable[..., Done]) -> None:
    done = run("check", "tiny", "--bounds", "-o", "run", "--tokens", "16", "--context", "16")
    assert (done.code, done.err) == (0, "")
    report = BoundsReport.load("run/bounds.json")
    assert report.checks == 30 * len(report.names)
    assert not report.violations
    assert "Every bound held" in done.out


def test_a_violated_bound_is_exit_code_1(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: norms that are too small."""
    certified = approx_module.certify
    monkeypatch.setattr(approx_module, "certify", lambda W: replace(certified(W), bound=certified(W).bound * 0.99))
    done = run(*COMMANDS["check"])
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "VIOLATED" in done.out
    assert not BoundsReport.load("runs/tiny/bounds.json").passed


@pytest.mark.usefixtures("drawn")
def test_check_reads_what_was_written(run: Callable[..., Done], pruned: Any, run_bad: Callable[..., str]) -> None:
    few = ["--tokens", "32", "--context", "16"]
    run("compress", "tiny", "--method", "wanda", "--sparsity", "0.5", "-o", "sparse", *TEXT)
    done = run("check", "tiny", "sparse", "-o", "run", *few)
    assert (done.code, done.err) == (0, "")
    assert {"run/bounds.json", "run/report.html", "run/figures/bounds.svg", "run/figures/ratios.svg"} <= done.changed
    report = BoundsReport.load("run/bounds.json")
    assert "\n".join(report.answer()) in done.out
    assert report.compressed is not None
    assert (report.measured_on.model.name, report.compressed.name) == ("tiny", "sparse")
    assert "nothing to check" in run_bad("check", "tiny", "tiny", *few)
    assert "both in one dtype" in run_bad("check", "tiny", half("sparse"), *few)
    pruned("1")
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
    done = run("rank", "run/profile.json", "--criterion", "rho", "--remove", "2")
    assert done.code == 0
    assert done.changed == {"run/plan.json"}
    plan, measured = PruningPlan.load("run/plan.json"), LayerProfile.load("run/profile.json")
    distance = abs(measured.contraction.rho - 1)
    assert plan.remove == tuple(sorted(distance.argsort()[:2].tolist()))


def test_prune_by_a_plan_removes_what_it_names(run: Callable[..., Done]) -> None:
    run("rank", "tiny", "--remove", "2", "-o", "run", *TEXT)
    done = run("prune", "tiny", "--plan", "run/plan.json", "-o", "out", *TEXT)
    assert done.code == 0, done.err
    assert "Removal check: passed" in done.out
    plan = PruningPlan.load("run/plan.json")
    with torch.no_grad():
        ids = torch.arange(40).view(1, 40)
        wanted = remove_layers(AutoModelForCausalLM.from_pretrained("tiny"), plan.remove)(ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained("out")(ids).logits, wanted)


def test_eval_measures_both_models_on_the_same_tokens(run: Callable[..., Done]) -> None:
    run(*COMMANDS["prune"])
    done = run("eval", "out", "--against", "tiny", "-o", "run", *TEXT)
    assert done.code == 0, done.err
    found = Evaluation.load("run/eval.json")
    dense, pruned = found.perplexities
    assert found.kl is not None
    assert (found.kl > 0).all()
    assert dense.measured_on.text_hash == pruned.measured_on.text_hash
    assert dense.measured_on.split == "evaluation"
    assert (dense.measured_on.model.num_layers, pruned.measured_on.model.num_layers) == (6, 5)


@pytest.mark.usefixtures("drawn")
def test_sensitivity_writes_its_result_the_profile_and_a_map(run: Callable[..., Done]) -> None:
    done = run("sensitivity", "tiny", "--study", "group,threshold", "-o", "run", *TEXT)
    assert (done.code, done.err) == (0, "")
    assert {"run/sensitivity/profile.json", "run/sensitivity.json", "run/figures/sensitivity-map.svg"} <= done.changed
    result = Sensitivity.load("run/sensitivity.json")
    assert "\n".join(result.answer()) in done.out
    assert result.calibrated_on is not None
    assert {result.measured_on.split, result.calibrated_on.split} == {"evaluation", "calibration"}
    assert "Sensitivity" in Path("run/report.html").read_text(encoding="utf-8")


def test_sensitivity_rounds(run: Callable[..., Done], run_bad: Callable[..., str]) -> None:
    rtn = ["sensitivity", "tiny", "--method", "rtn", *TEXT]
    for bits in (4, 2):
        done = run(*rtn, "--study", "layer", "--bits", str(bits), "-o", f"run{bits}")
        assert (done.code, done.err) == (0, "")
        result = Sensitivity.load(f"run{bits}/sensitivity.json")
        assert (result.compression.bits, set(result.of("layer").bits)) == (bits, {bits})
        assert f"(rtn, {bits} bits)" in done.out
    assert "--method rtn; give --bits" in run_bad(*rtn, "--sparsity", "0.3")
    assert "magnitude takes no bits" in run_bad("sensitivity", "tiny", "--bits", "3", *TEXT)
    assert "rtn cannot take bits 1" in run_bad(*rtn, "--bits", "1")
    assert "no effect on removal" in run_bad("sensitivity", "tiny", "--study", "removal", "--method", "rtn", *TEXT)


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
    assert run("sensitivity", "x.gguf", "--study", "removal", "-o", "run", *QUICK[:-2]).code == 0
    line = run("cache").out.splitlines()[-1]
    assert re.search(r"KB  last used .*  sweep, by: lyapunov-prune sensitivity x.gguf --study removal", line)
    assert "GB deleted" in run("cache", "--clear").out
    assert len(run("cache").out.splitlines()) == 1
    assert not Path("runs/jobs").exists()
    assert list(place.iterdir()) == []
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE_GB", "much")
    assert "LYAPUNOV_PRUNE_CACHE_GB is 'much'" in run_bad("cache")


# Text of rows.


def test_what_is_read_of_rows_is_said_and_recorded(run: Any, checkpoint: Path) -> None:
    rows = [
        {"instruction": f"Say {n}", "output": f"so {n} be {n * n} it " * 9, "story": f"One {n} two. " * 9}
        for n in range(40)
    ]
    Path("x.json").write_text(json.dumps(rows))
    sparse = ("compress", "tiny", "--method", "wanda", "--sparsity", "0.5", *TEXT)
    for text, name in (("x.json", "x.json (instruction, output, joined)"), ("x.json:story", "x.json (story)")):
        done = run(*sparse, "--text", text, "-o", "out")
        assert done.code == 0, done.err
        assert f"Text: {name}\n" in done.err
        assert CompressionReport.load("out/compression.json").calibration.text == name
        assert run("eval", "out", *TEXT, "--text", text).code == 0
        shutil.rmtree("out")
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained("tiny")
    assert "Text: x.json (instruction" in run("profile", "tiny", *QUICK, "--text", "x.json").err
    assert "leave out :story" in run("profile", "tiny", *QUICK, "--text", "builtin:story").err


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
