"""`--device disk` from the command line: the same results, and refusals before anything is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TEXT, make_tiny, tensors

from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.compression import CompressionReport
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.export import disk_gate
from lyapunov_prune.export.copied import prune_on_disk
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.pruning.gate import CACHED, SKIPPED
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance

COMPRESS = ["compress", "tiny", "--method", "wanda", "-o", "out"]
PACKED = ["--method", "rtn", "--bits", "4", "--format", "packed", "-o", "out"]


def test_ranked_pruned_and_scored_as_in_memory(run: Callable[..., Any]) -> None:
    for flags, folder in ((["--device", "disk"], "apart"), ([], "whole")):
        assert run("profile", "tiny", *flags, *TEXT, "-o", folder).code == 0
        assert run("rank", "tiny", *flags, "--criterion", "blend", "--remove", "2", *TEXT, "-o", folder).code == 0
    a, b = (LayerProfile.load(Path(folder) / "profile.json") for folder in ("apart", "whole"))
    np.testing.assert_allclose(a.contraction.rho, b.contraction.rho, rtol=1e-5)
    apart, whole = (PruningPlan.load(Path(folder) / "plan.json") for folder in ("apart", "whole"))
    assert apart.remove == whole.remove
    assert apart.model == whole.model
    done = run("prune", "tiny", "--plan", "apart/plan.json", "--device", "disk", "-o", "smaller")
    assert (done.code, done.err) == (0, "")
    assert "removal checks on files, and on logits of streamed models:" in done.out
    assert "Not run: cached decoding." in done.out
    assert "Next: lyapunov-prune eval smaller --against tiny --device disk\n" in done.out
    made = Provenance.load(Path("smaller") / PROVENANCE)
    assert made.not_run == (CACHED,)
    assert [c.name for c in made.gate.checks][-1] == SKIPPED
    assert made.gate.passed
    assert made.gate.measured_on is not None
    assert made.gate.measured_on.model == whole.model
    assert "both models read one layer at a time" in " ".join(Path("smaller/README.md").read_text().split())
    for flags, folder in ((["--device", "disk"], "apart"), ([], "whole")):
        assert run("eval", "smaller", "--against", "tiny", *flags, *TEXT, "-o", folder).code == 0
    c, d = (Evaluation.load(Path(folder) / "eval.json") for folder in ("apart", "whole"))
    assert c.zeros == d.zeros
    np.testing.assert_allclose([p.nll for p in c.perplexities], [p.nll for p in d.perplexities], rtol=1e-6)


@pytest.mark.skipif(not installed(), reason="xllamacpp is not installed")
def test_a_file_of_a_size_as_in_memory(run: Callable[..., Any]) -> None:
    sized = ("shrink", "tiny", "--size", "9bpw", "--tokens", "384", "--context", "32")
    for flags, file in ((["--device", "disk"], "apart.gguf"), ([], "whole.gguf")):
        done = run(*sized, *flags, "-o", file)
        assert done.code == 0, done.err
    assert Path("apart.gguf").read_bytes() == Path("whole.gguf").read_bytes()


def test_compressed_as_in_memory(run: Callable[..., Any]) -> None:
    by = ["--sparsity", "0.5", "--allocation", "atp"]
    for flags, folder in ((["--device", "disk"], "apart"), ([], "whole")):
        done = run("compress", "tiny", *flags, "--method", "wanda", *by, *TEXT, "-o", folder)
        assert (done.code, done.err) == (0, "")
    apart, whole = (CompressionReport.load(Path(folder) / "compression.json") for folder in ("apart", "whole"))
    np.testing.assert_allclose(apart.allocation.amount, whole.allocation.amount, rtol=1e-4)
    np.testing.assert_allclose(apart.zeros, whole.zeros, rtol=1e-3)
    for folder in ("apart", "whole"):
        run("eval", folder, *TEXT, "-o", f"{folder}-scored")
    found = [Evaluation.load(f"{folder}-scored/eval.json").perplexities[0].nll for folder in ("apart", "whole")]
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_channels_are_measured_and_removed_a_layer_at_a_time(run: Callable[..., Any]) -> None:
    width = ["prune", "tiny", "--what", "width", "--remove", "25%", *TEXT, "--context", "16"]
    done = run(*width, "--device", "disk", "-o", "narrower")
    assert (done.code, done.err) == (0, "")
    assert run(*width, "-o", "whole").code == 0
    apart, whole = (Provenance.load(Path(folder) / PROVENANCE) for folder in ("narrower", "whole"))
    assert apart.plan.gone == whole.plan.gone
    assert (apart.mended, apart.gate.passed, apart.not_run) == (None, True, (CACHED,))
    apart.plan.save("plan.json")
    assert run("prune", "tiny", "--plan", "plan.json", "--device", "disk", "-o", "again").code == 0
    assert tensors(Path("again")) == tensors(Path("narrower"))


@pytest.mark.parametrize("what", ["layers", "attention"])
def test_other_orders_are_streamed_too(what: str, run: Callable[..., Any]) -> None:
    for criterion in ("bi", *(["angular", "kl"] if what == "layers" else [])):
        asked = ["--criterion", criterion, "--what", what, "--remove", "2", *TEXT]
        plans = []
        for flags in (["--device", "disk"], []):
            assert run("rank", "tiny", *flags, *asked).code == 0
            plans.append(PruningPlan.load("runs/tiny/plan.json"))
        assert plans[0].remove == plans[1].remove
        assert plans[1].criterion == criterion


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["rank", "tiny", "--criterion", "kl", "--what", "attention"],
            "criterion kl runs the model once for every layer",
        ),
        (["eval", "tiny", "--speed"], "--speed needs the model in memory"),
        (["eval", "tiny", "--tasks", "piqa"], "--tasks needs the model in memory"),
        (
            ["prune", "tiny", "--remove", "2", "-o", "out"],
            "--remove needs the model in memory .* from rank --device disk",
        ),
        (
            ["prune", "tiny", "--what", "width", "--remove", "25%", "--judge", "builtin", "-o", "out"],
            "--judge needs the model in memory",
        ),
        (["profile", "model.gguf"], "is no safetensors file, and only those are streamed"),
    ],
)
def test_what_is_not_streamed_is_refused(arguments: list[str], message: str, run: Callable[..., Any]) -> None:
    Path("model.gguf").write_bytes(b"GGUF")
    done = run(*arguments, "--device", "disk")
    assert (done.code, done.changed, done.err.count("\n")) == (2, set(), 1)
    assert re.search(message, done.err)


def test_another_layer_skipped_is_not_what_was_written(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = disk_gate.skipped
    monkeypatch.setattr(disk_gate, "skipped", lambda structure, layers: skipped(structure, (2, *layers[1:])))
    done = run("prune", "tiny", "--layers", "1,4", "--device", "disk", "-o", "out")
    assert (done.code, done.changed) == (1, set())
    assert "same as skipping" in done.err


def test_a_setting_outside_the_layers_is_seen_by_logits_alone(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks on files look at the layers' settings and at weights; the base of the rotary angles is neither."""
    cut = disk_gate.streamed

    def turned(outline: Any) -> Any:
        if len(outline.decoder.structure.layers) == 4:
            outline.model.config.rope_parameters["rope_theta"] = 20.0
        return cut(outline)

    monkeypatch.setattr(disk_gate, "streamed", turned)
    assert run("prune", "tiny", "--layers", "1,4", "--device", "disk", "-o", "out").code == 1
    outline = read_outline(Path("tiny"), "tiny")
    prune_on_disk(outline, PruningPlan.given(outline.identity, [1, 4]), "unseen")  # compares no logits


def test_a_long_window_is_split_and_still_the_same(run: Callable[..., Any]) -> None:
    """The gate's inputs are longer than a sliding window."""
    make_tiny("mistral", vocab_size=260).save_pretrained("tiny")
    assert run("prune", "tiny", "--layers", "1,4", "--device", "disk", "-o", "out").code == 0
