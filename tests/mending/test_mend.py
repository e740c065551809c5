"""Gaps that are mended: the fit against states taken without hooks, the choice, and what the gate says of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import Done, make_tiny, operated, states_of
from transformers import AutoModelForCausalLM, PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.mending import mend as mending
from lyapunov_prune.mending import report
from lyapunov_prune.mending.fit import LinearMap
from lyapunov_prune.mending.mend import Mend, fit_mends, store_mend
from lyapunov_prune.mending.place import find_place
from lyapunov_prune.mending.report import NONE, MendReport
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning import gate
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.pruning.removal import verify_removal
from lyapunov_prune.pruning.removed import PartsGone
from lyapunov_prune.results.history import read_history

GAPS = (2, 4)


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(2, 90, (8, 24), generator=torch.Generator().manual_seed(3))


def only(monkeypatch: pytest.MonkeyPatch, form: str, ridge: float) -> None:
    monkeypatch.setattr(mending, "_candidates", lambda place: [(form, ridge)])
    monkeypatch.setattr(mending, "_least", lambda losses: 1)  # the map, whatever it costs


def reference(
    dense: PreTrainedModel, pruned: PreTrainedModel, layer: int, behind: int, ids: torch.Tensor, ridge: float = 0.1
) -> np.ndarray:
    """E of the layer of `pruned` before a gap, whose state should be that of boundary `behind` of the dense model.

    `E = Σ w (y − h) mᵀ (Σ w m mᵀ + λ I)⁻¹`, w = 1/‖y‖², from states taken without hooks.
    """
    block: Any = find_structure(pruned).layers[layer]
    given: list[torch.Tensor] = []
    forward = block.mlp.forward
    block.mlp.forward = lambda x: given.append(forward(x)) or given[-1]
    rows = []
    for window in ids:
        h, y = states_of(pruned, window[None])[layer + 1][0], states_of(dense, window[None])[behind][0]
        rows.append((given[0][0], y - h, y))
        given.clear()
    del block.mlp.forward
    m, r, y = (torch.cat(part).numpy() for part in zip(*rows, strict=True))
    w = 1 / np.linalg.norm(y, axis=-1, keepdims=True)
    G = (w * m).T @ m
    return np.asarray(np.linalg.solve(G + ridge * np.trace(G) / len(G) * np.eye(len(G)), (w * m).T @ r).T)


def test_the_maps_are_those_of_states_taken_without_hooks(
    windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each brings what its layer leaves nearest to the dense state behind the gap; the second sees the first mended."""
    model = make_tiny("llama").double()
    only(monkeypatch, "full", 0.1)
    (first, second), report = fit_mends(model, GAPS, windows)
    assert (report.fitted, report.held_out) == (6 * 24, 2 * 24)
    np.testing.assert_allclose(first.map.E, reference(model, operated(model, GAPS), 1, 3, windows), atol=1e-8)
    made = operated(model, GAPS, mends=[first])  # layer 3 is its layer 2
    # Llama's norms round to float32: stored maps and hooks may fall on different sides.
    np.testing.assert_allclose(second.map.E, reference(model, made, 2, 5, windows), atol=1e-6)
    unmended = reference(model, operated(model, GAPS), 2, 5, windows)
    assert np.abs(second.map.E.numpy() - unmended).max() > 1e-3


def test_the_choice_is_the_smallest_held_out_loss(windows: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    mends, report = fit_mends(model, GAPS, windows)
    for gap in report.gaps:
        assert gap.forms[0] == NONE
        assert gap.losses[gap.chosen] == gap.losses.min()
    assert len(mends) == sum(g.chosen > 0 for g in report.gaps)


def test_what_is_compared_has_not_seen_the_windows_that_choose(windows: torch.Tensor) -> None:
    model = make_tiny("llama").double()
    (gap,) = fit_mends(model, (2,), windows)[1].gaps
    place = find_place(wrap(model), 1)
    fitted, held = windows[:6], windows[6:]
    assert lp.perplexity(operated(model, (2,)), held).nll == pytest.approx(gap.losses[0], rel=1e-6)
    for form, ridge, loss in zip(gap.forms, gap.ridges, gap.losses, strict=True):
        if form == "full":
            E = torch.from_numpy(reference(model, operated(model, (2,)), 1, 3, fitted, ridge))
            made = operated(model, (2,), mends=[Mend(place, LinearMap(E, None))])
            assert lp.perplexity(made, held).nll == pytest.approx(loss, rel=1e-6)


def test_every_family_passes_the_gate(family: str, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "_least", lambda losses: 1)
    model = make_tiny(family)
    plan = PruningPlan.given(model, GAPS)
    mends, _ = fit_mends(model, plan.remove, windows)
    report = verify_removal(model, operated(model, plan, mends=mends), plan, windows[:1], mends=mends)
    assert report.passed, f"\n{report}"
    assert len(mends) == 2
    if family in ("gemma2", "gemma3"):
        assert all(m.map.E.ndim == 1 for m in mends)


def test_what_half_precision_rounds_is_decided_in_float32(
    windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit between what the two forwards of bfloat16 differ by, and what the rounded matrices alone change."""
    only(monkeypatch, "full", 0.1)
    model = make_tiny("llama").bfloat16()
    plan = PruningPlan.given(model, GAPS)
    mends, _ = fit_mends(model, plan.remove, windows)
    made = operated(model, plan, mends=mends)

    def skipping(pruned: PreTrainedModel) -> GateCheck:
        return verify_removal(model, pruned, plan, windows[:1], mends=mends).checks[0]

    rounded = skipping(made)
    assert rounded.passed
    monkeypatch.setattr(gate.Gate, "limit", 0.99 * rounded.measured)
    found = skipping(made)
    assert found.passed
    assert found.measured < rounded.measured
    assert "in float32" in found.detail
    assert not skipping(operated(model, PruningPlan.given(model, (2, 5)), mends=mends)).passed  # planted: another layer


def wrong_layer(made: PreTrainedModel, mends: tuple[Mend, ...]) -> None:
    first = mends[0].place
    store_mend(find_structure(made).layers[0], Mend(first, mends[0].map))


def transposed(made: PreTrainedModel, mends: tuple[Mend, ...]) -> None:
    store_mend(find_structure(made).layers[1], replace(mends[0], map=LinearMap(mends[0].map.E.T, mends[0].map.shift)))


def lost_shift(made: PreTrainedModel, mends: tuple[Mend, ...]) -> None:
    store_mend(find_structure(made).layers[1], replace(mends[0], map=LinearMap(mends[0].map.E, None)))


def a_little_off(made: PreTrainedModel, mends: tuple[Mend, ...]) -> None:
    store_mend(find_structure(made).layers[1], mends[0])
    with torch.no_grad():
        find_structure(made).layers[1].mlp.c_proj.weight[3, 4] *= 1 + 1e-3  # type: ignore[union-attr, index, operator]


@pytest.mark.parametrize("fault", [wrong_layer, transposed, lost_shift, a_little_off])
def test_planted_faults_fail_the_gate(fault: Any, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "full", 0.1)
    model = make_tiny("gpt2")
    mends, _ = fit_mends(model, (2,), windows)
    made = operated(model, (2,))
    fault(made, mends)
    failed = verify_removal(model, made, [2], windows[:1], mends=mends)
    assert not failed.passed
    assert verify_removal(model, operated(model, (2,), mends=mends), [2], windows[:1], mends=mends).passed


def test_in_python(windows: torch.Tensor) -> None:
    model = make_tiny("llama")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    made = lp.mend(model, [2, 3], windows)
    assert type(made) is type(model)
    assert made.config.num_hidden_layers == 4
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert made.num_parameters() == lp.remove_layers(model, [2, 3]).num_parameters()
    unjudged = make_zoo("starcoder2")  # goes through the gate
    assert lp.mend(unjudged, [2], windows).config.num_hidden_layers == 7


def bad(model: PreTrainedModel, case: str, windows: torch.Tensor) -> Any:
    return {
        "first": lambda: lp.mend(model, [0], windows),
        "window": lambda: lp.mend(model, [2], windows[:1]),
        "tokens": lambda: lp.mend(model, [2], windows[:2, :8]),
        "parts": lambda: lp.mend(model, PruningPlan.given(model, PartsGone((2,), (1,))), windows),
        "shared": lambda: lp.mend(make_zoo("rwkv"), [2], windows),
        "batch": lambda: lp.mend(model, [2], None),  # type: ignore[arg-type]
    }[case]


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        ("first", "layer 0 is removed.*before the gap"),
        ("window", "0 tokens .*32 channels.*43 tokens"),
        ("tokens", "8 tokens .*32 channels"),
        ("parts", "parts of layers"),
        ("shared", r"layer 1 \(RwkvBlock\)"),
        ("batch", "batch is None"),
    ],
)
def test_bad_input_is_one_line(case: str, remedy: str, windows: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match=remedy):
        bad(make_tiny("llama"), case, windows)()


def test_losses_that_are_not_finite_choose_nothing(windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending._Walks, "loss", lambda *_: float("nan"))
    with pytest.raises(LyapunovPruneError, match="no held-out loss"):
        lp.mend(make_tiny("llama"), [2], windows)
    assert mending._least([float("nan"), 3.0, float("inf")]) == 1


def test_a_product_beyond_the_dtype_is_refused() -> None:
    model = make_tiny("llama").half()
    layer = find_structure(model).layers[1]
    place = mending.find_place(wrap(model), 1)
    large = Mend(place, LinearMap(1e6 * torch.ones(32, dtype=torch.float64), None))
    with pytest.raises(LyapunovPruneError, match=r"mlp.down_proj.weight of layer 1, mended"):
        store_mend(layer, large)


# The command.

TEXT = ("--text", "builtin", "--tokens", "512", "--context", "64")


def test_prune_writes_a_mended_checkpoint(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "pays", lambda check, other: True)
    done = run("prune", "tiny", "--layers", "2,3", "--mend", *TEXT, "-o", "out")
    assert done.code == 0, done.err
    assert "gaps mended on 256 tokens, forms and ridges chosen by 64" in done.out
    provenance = Provenance.load(Path("out") / PROVENANCE)
    assert isinstance(provenance.mended, MendReport)
    assert provenance.mended.kept
    assert provenance.gate.passed
    assert [c.name for c in provenance.gate.checks].count("merged within rounding") == bool(
        provenance.mended.gaps[0].chosen
    )
    assert AutoModelForCausalLM.from_pretrained("out").config.num_hidden_layers == 4
    card = (Path("out") / "README.md").read_text()
    assert "## Mended" in card
    assert "fitted on 192" in card
    (step,) = read_history("out").steps
    assert [saw.tokens for saw in step.saw] == [256, 256, 2048]


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--remove", "8", "--what", "width"], "--mend closes the gaps"),
        (["--layers", "2,3", "--what", "attention"], "--mend closes the gaps"),
        (["--layers", "2,3", "--device", "disk"], "--mend .*in memory"),
        (["--layers", "2", "--tokens", "64", "--context", "8"], "24 tokens.*86 tokens"),
        (["--layers", "0,3"], "layer 0 is removed.*before the gap"),
        (["--layers", "2", "--tokens", "64", "--context", "64"], "too few windows"),
    ],
)
def test_bad_options_are_one_line_and_leave_nothing(
    run: Callable[..., Done], arguments: list[str], remedy: str
) -> None:
    done = run("prune", "tiny", *TEXT, *arguments, "--mend", "-o", "out")
    left = {path for path in done.changed if not path.startswith("runs")}  # where the text that the model wrote is kept
    assert (done.code, left) == (2, set())
    assert re.search(remedy, " ".join(done.err.split()))
    assert "Traceback" not in done.err
