"""What text that no map has seen says of mending, and what is written then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Done, make_tiny

import lyapunov_prune as lp
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.mending import judge as judging
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance

GAPS = (2, 4)
TEXT = ("--text", "builtin", "--tokens", "512", "--context", "64")


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(2, 90, (8, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def short_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_TOKENS", 128)
    monkeypatch.setattr(judging, "_CONTEXT", 32)


def judged(monkeypatch: pytest.MonkeyPatch, check: float, other: float) -> None:
    """Mending changes the loss of its own text, 64 tokens a window, and of the other so much."""
    losses = judging.losses

    def fake(reading: Any, removed: Any, mends: Any = ()) -> np.ndarray:
        found = losses(reading, removed)
        return found if mends == () else found + (check if reading.batch.context == 64 else other)

    monkeypatch.setattr(judging, "losses", fake)


@pytest.mark.parametrize(("check", "other"), [(0.1, 0.1), (0.1, -0.1), (-0.1, 0.1)])
def test_what_does_not_pay_is_not_written_and_said(
    check: float, other: float, run: Callable[..., Done], short_judge: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A map that fits its text alone, (−, +), is one of them."""
    judged(monkeypatch, check, other)
    done = run("prune", "tiny", "--layers", "2,3", "--mend", *TEXT, "-o", "out")
    assert done.code == 0, done.err
    assert "not mended, as it does not help" in done.out
    assert done.out.count("Mending: ") == 2
    run("prune", "tiny", "--layers", "2,3", *TEXT, "-o", "bare")
    assert Path("out/model.safetensors").read_bytes() == Path("bare/model.safetensors").read_bytes()
    provenance = Provenance.load(Path("out") / PROVENANCE)
    assert provenance.mended is not None
    assert not provenance.mended.kept
    assert "Mending was tried and left out" in (Path("out") / "README.md").read_text()


def test_a_second_text_judges(run: Callable[..., Done], tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(
        "\n\n".join(f"Paragraph {n} of another text, in which the number {n * n} stands." for n in range(400))
    )
    done = run("prune", "tiny", "--layers", "2,3", "--mend", "--judge", str(other), *TEXT, "-o", "out")
    assert done.code == 0, done.err
    report = Provenance.load(Path("out") / PROVENANCE).mended
    assert report is not None
    assert report.other is not None
    assert (report.other.measured_on.text, report.other.measured_on.tokens) == (str(other), 256)


def test_the_judgement_is_of_text_that_no_map_has_seen(windows: torch.Tensor) -> None:
    """Losses are those of physical removals, the maps fitted on the other half alone."""
    model = make_tiny("llama")
    other = torch.randint(2, 90, (5, 16), generator=torch.Generator().manual_seed(4))
    mends, report = judging.judged_mends(model, GAPS, windows, other)
    bare, small = lp.remove_layers(model, GAPS), lp.mend(model, GAPS, windows[::2])
    for found, text in zip(report.judgements, (windows[1::2], other), strict=True):
        np.testing.assert_allclose(found.before, lp.perplexity(bare, text).windows, rtol=1e-4)
        np.testing.assert_allclose(found.after, lp.perplexity(small, text).windows, rtol=1e-4)
    assert bool(mends) == report.kept


def test_too_few_windows_to_judge_by_are_refused(windows: torch.Tensor) -> None:
    other = torch.randint(2, 90, (4, 16), generator=torch.Generator().manual_seed(4))
    for text, judge in [(windows[:1], other), (windows[:7], other), (windows, other[:3])]:
        with pytest.raises(LyapunovPruneError, match="too few windows"):
            judging.judged_mends(make_tiny("llama"), GAPS, text, judge)


def test_the_model_writes_the_second_text(windows: torch.Tensor, short_judge: None) -> None:
    report = judging.judged_mends(make_tiny("llama"), GAPS, windows)[1]
    assert report.other is not None
    assert report.other.measured_on.text.startswith("written by")
    assert (report.other.measured_on.tokens, report.other.measured_on.context) == (128, 32)


def test_without_a_text_the_model_writes_it_and_the_built_in_one_judges(run: Callable[..., Done]) -> None:
    assert run("prune", "tiny", "--layers", "2,3", "--mend", *TEXT[2:], "-o", "out").code == 0
    report = Provenance.load(Path("out") / PROVENANCE).mended
    assert report is not None
    assert report.other is not None
    assert report.measured_on.text.startswith("written by tiny (weights ")
    assert report.measured_on.text.endswith("temperature 1, seed 0)")
    assert (report.other.measured_on.text, report.other.measured_on.tokens) == ("builtin", 256)


def test_what_could_only_get_worse_is_not_written() -> None:
    """The student wrote all text itself, so that no other model predicts it better; the teacher differs from it."""
    written = []
    for seed in range(8):
        model = make_tiny("llama", seed=seed)
        student = lp.remove_layers(model, GAPS)
        batch, other = (lp.self_generated(student, tokens=8 * 48, context=48, seed=s) for s in (seed, seed + 99))
        mends, report = judging.judged_mends(model, GAPS, batch, other)
        assert report.check is not None
        if mends:
            written.append((seed, report.check.comparison.change))
    assert written == []
