"""`compress --format packed`, and what is done with what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_tiny, write_gguf
from packed_files import one_integer, spoil_what_is_packed
from packed_kernels import write_packed_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from lyapunov_prune.bounds.report import BoundsReport
from lyapunov_prune.budget.spent import Spent
from lyapunov_prune.models.size import stored_size

TEXT = ("--tokens", "64", "--context", "8")
PACK = ("compress", "tiny", "--method", "rtn", "--format", "packed", "-o", "small")


def test_a_packed_checkpoint_is_smaller_and_is_measured(run: Callable[..., Any], reader: PreTrainedModel) -> None:
    done = run(*PACK, "--bits", "4")
    assert done.code == 0, done.err
    assert "Stored as packed integers (pack-quantized): " in done.out
    assert "no time is saved" in done.out
    assert "Decompressing" not in done.err
    assert Path("small/model.safetensors").stat().st_size < Path("tiny/model.safetensors").stat().st_size
    AutoModelForCausalLM.from_pretrained("small")
    report = json.loads(Path("small/compression.json").read_text())
    assert report["packed"]["bytes"] == Path("small/model.safetensors").stat().st_size
    size = stored_size("small")
    assert size is not None
    assert size.weights == report["packed"]["weights"] == reader.num_parameters()
    assert size.bits < 32
    assert f"Written: small ({size.told()})" in done.out
    assert f" bytes ({size.told()})." in Path("small/README.md").read_text()

    done = run("eval", "small", "--against", "tiny", "--speed", *TEXT)
    assert done.code == 0, done.err
    assert "The packed weights of small were unpacked on loading: these are speeds of dense ones." in done.out
    assert f"{size.told()} (of " in done.out
    assert "no memory is saved" not in done.out  # as it was said of every packed folder
    assert run("profile", "small", "-o", "run", *TEXT).code == 0
    assert run("rank", "small", "--criterion", "bi", "-o", "run2", *TEXT).code == 0


@pytest.mark.parametrize("flags", [[], ["--device", "disk"]], ids=["memory", "disk"])
def test_a_folder_of_a_size_says_how_to_run_it(
    flags: list[str], run: Callable[..., Any], run_bad: Callable[..., str]
) -> None:
    sized = ("shrink", "tiny", "--size", "13bpw", "--tokens", "384", "--context", "32", "-o", "small", *flags)
    done = run(*sized)
    assert done.code == 0, done.err
    assert "Run it: vllm serve small" in done.out
    spent, size = Spent.load("small/size.json"), stored_size("small")
    assert size is not None
    assert spent.bits <= 13
    assert 0 < size.bytes - spent.size < 160 * 3 * len(spent.names) + 8192  # the header
    assert f"Written: small ({size.told()})" in done.out
    assert run("eval", "small", "--against", "tiny", *TEXT).code == 0
    assert "not empty" in run_bad(*sized)


def test_weights_that_stay_packed_are_measured_and_never_changed(
    run: Callable[..., Any], run_bad: Callable[..., str]
) -> None:
    write_packed_checkpoint(make_tiny("llama", vocab_size=260), Path("kernels"))
    for file in Path("tiny").glob("tokenizer*"):
        (Path("kernels") / file.name).write_bytes(file.read_bytes())
    assert run("profile", "kernels", "--epsilon", "0.2", "-o", "run", *TEXT).code == 0
    for criterion in ("bi", "kl"):
        assert run("rank", "kernels", "--criterion", criterion, "-o", "run", *TEXT).code == 0
    done = run("eval", "kernels", "--against", "tiny", "--speed", *TEXT)
    assert done.code == 0, done.err
    assert "unpacked on loading" not in done.out
    for command in (
        ("prune", "kernels", "--layers", "1", "-o", "out", *TEXT),
        ("prune", "kernels", "--remove", "1", "-o", "out", *TEXT),
        ("compress", "kernels", "--sparsity", "0.5", "-o", "out", *TEXT),
        ("profile", "kernels", "--device", "disk", *TEXT),
    ):
        assert "quantised (hand-made)" in run_bad(*command)


def test_what_would_change_packed_weights_is_refused(run: Callable[..., Any], run_bad: Callable[..., str]) -> None:
    run(*PACK, "--bits", "8")
    for command in (
        ("compress", "small", "--sparsity", "0.5", "-o", "out", *TEXT),
        ("compress", "small", "--sparsity", "0.5", "--device", "disk", "-o", "out", *TEXT),
        ("prune", "small", "--remove", "1", "-o", "out", *TEXT),
    ):
        assert "quantised (compressed-tensors)" in run_bad(*command)
    assert "where files are pruned" in run_bad("prune", "small", "--layers", "1", "-o", "out", *TEXT)
    done = run("prune", "small", "--layers", "1", "-o", "out")
    assert done.code == 0, done.err
    assert "its weights are quantised (compressed-tensors)" in done.out


def test_a_packed_checkpoint_is_made_ranked_pruned_and_scored_a_layer_at_a_time(run: Callable[..., Any]) -> None:
    done = run(*PACK, "--bits", "4", "--device", "disk")
    assert done.code == 0, done.err
    assert "Stored as packed integers (pack-quantized): " in done.out
    for command in (
        ("rank", "small", "--device", "disk", "--criterion", "bi", "--remove", "2", "-o", "run", *TEXT),
        ("prune", "small", "--device", "disk", "--plan", "run/plan.json", "-o", "smaller"),
        ("eval", "smaller", "--device", "disk", "--against", "small", *TEXT),
    ):
        done = run(*command)
        assert done.code == 0, done.err


def test_the_matrices_of_a_gguf_file_are_checked(run: Callable[..., Any], reader: PreTrainedModel) -> None:
    write_gguf(reader, Path("q8.gguf"), packed=True)
    done = run("check", "tiny", "q8.gguf", "-o", "run", *TEXT)
    assert done.code == 0, done.err
    report = BoundsReport.load("run/bounds.json")
    assert report.shared == ("model.embed_tokens.weight", "lm_head.weight")
    rounded = np.array([component != "mlp.down_proj" for component in report.components])  # rows of 48 stay dense
    assert (report.attained[0] > 0.9999).tolist() == rounded.tolist()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--bits", "3"), "not 3 bits"),
        ((), "needs an amount; give --bits 4"),
        (("--bits", "4", "--group-size", "5"), "groups of 5"),
    ],
)
def test_what_cannot_be_packed_is_one_line(more: tuple[str, ...], told: str, run_bad: Callable[..., str]) -> None:
    assert told in run_bad(*PACK, *more)


def test_other_methods_and_grids_are_one_line(
    run: Callable[..., Any], run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = ("--format", "packed", "-o", "small")
    assert "not those of wanda" in run_bad("compress", "tiny", "--sparsity", "0.5", *packs)
    told = run_bad("compress", "tiny", "--method", "magnitude", "--sparsity", "2:4", *packs)
    assert "not those of magnitude" in told
    Path("small").mkdir()
    Path("small/mine").write_text("")
    assert "small exists" in run_bad(*PACK, "--bits", "4")


def test_a_gate_that_fails_leaves_nothing(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_what_is_packed(monkeypatch, one_integer)
    for more, told in (
        ((), "the model does not unpack as it was rounded"),
        (("--device", "disk"), "the files hold other weights than were written"),
    ):
        done = run(*PACK, "--bits", "4", *more)
        assert (done.code, done.changed) == (1, set())
        assert all(words in done.err for words in ("nothing written", told))
