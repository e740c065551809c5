"""The last matrices refitted to the channels that stay: the least-squares solution, judged, and written as judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import make_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from lyapunov_prune import LyapunovPruneError, PruningPlan, remove_layers, self_generated
from lyapunov_prune.data.batch import checked_batch
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.mending.refit import judged_refits, refitted
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.feedforward import find_feedforward
from lyapunov_prune.models.structure import identify
from lyapunov_prune.pruning.removal import check_removal
from lyapunov_prune.pruning.surgery import Operation, cut
from lyapunov_prune.pruning.width import choose_channels


def test_it_is_the_least_squares_solution() -> None:
    generator = torch.Generator().manual_seed(0)
    W, h = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5, 7), (40, 7)))
    kept = torch.tensor([0, 2, 3, 6])
    found = refitted(W, h.T @ h, kept, damping=0.0)
    assert torch.allclose(found.T, torch.linalg.lstsq(h[:, kept], h @ W.T).solution, rtol=1e-9)
    assert torch.allclose(refitted(W, h.T @ h, kept, damping=1e9), W[:, kept], atol=1e-6)
    # The minimum of the squares with a ridge to the cut matrix: its gradient is zero.
    found = refitted(W, h.T @ h, kept, damping=0.1)
    ridge = 0.1 * (h.T @ h).diagonal().mean()
    gradient = (h[:, kept] @ found.T - h @ W.T).T @ h[:, kept] + ridge * (found - W[:, kept])
    assert gradient.abs().max() < 1e-10


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(97, (8, 20), generator=torch.Generator().manual_seed(1))


def redundant(family: str) -> PreTrainedModel:
    """Channels 8 to 23 of every block are copies of 0 to 7: a cut loses them, and a refit makes up for it."""
    model = make_tiny(family)
    structure = wrap(model).structure
    for i, layer in enumerate(structure.layers):
        parts = find_feedforward(structure, i).parts(layer)
        for tensor in (*(parts.gate or ()), *parts.up):
            if tensor is not None:
                tensor[8:24] = tensor[:8].repeat(2, *[1] * (tensor.ndim - 1))
    return model


def planned(model: PreTrainedModel, ids: torch.Tensor) -> PruningPlan:
    plan = choose_channels(model, ids, 8)
    return replace(plan, gone=replace(plan.gone, channels=((tuple(range(8, 24)),),) * 6))


def test_a_refit_makes_up_for_channels_that_others_repeat() -> None:
    """Of text that the model has written itself, more is predicted with it than without."""
    model = redundant("llama")
    batch, judge = (self_generated(model, tokens=512, context=64, seed=seed) for seed in (0, 1))
    _, report = judged_refits(model, planned(model, batch.ids).gone.kept_channels, batch, judge)
    assert all(judgement.comparison.change < -0.02 for judgement in report.judgements)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "opt"])
def test_a_refit_that_pays_is_written_and_proven(
    family: str, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MendReport, "kept", property(lambda self: True))  # random text says nothing of what pays
    model = redundant(family)
    decoder, before = wrap(model), identify(model)
    batch, judge = (checked_batch(decoder.structure, given) for given in (ids, ids.flip(1)))
    plan = planned(model, ids)
    made = write_pruned(model, None, plan, tmp_path / "out", batch, judge=judge)
    assert made.mended is not None
    assert made.gate.passed
    assert "refitted" in made.headline()
    assert {m.text_hash for m in made.plan.measured_on} >= {j.measured_on.text_hash for j in made.mended.judgements}
    assert identify(model).weights == before.weights
    refits, _ = judged_refits(model, plan.gone.kept_channels, batch, judge)
    operation = Operation(plan, refits=refits)
    pruned = cut(decoder, operation)
    assert check_removal(decoder, pruned, operation, batch).passed
    assert not check_removal(decoder, pruned, Operation(plan), batch).passed
    with torch.no_grad():  # two columns of one matrix change places
        block = find_feedforward(pruned.structure, 2)
        W = block.out.weight(pruned.layers[2])
        W[:, [0, 1]] = W[:, [1, 0]].clone()
    assert not check_removal(decoder, pruned, operation, batch).passed


def test_a_refit_that_does_not_pay_is_left(ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama")
    monkeypatch.setattr(MendReport, "kept", property(lambda self: False))
    plan = choose_channels(model, ids, 8)
    made = write_pruned(model, None, plan, tmp_path / "out", ids, judge=checked_batch(wrap(model).structure, ids + 0))
    assert "not refitted" in made.headline()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert identify(written).weights == identify(remove_layers(model, plan)).weights
    assert "Mending:" in (tmp_path / "out" / "README.md").read_text()


def test_one_window_cannot_judge(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    plan = choose_channels(llama, ids, 8)
    with pytest.raises(LyapunovPruneError, match="too few windows"):
        write_pruned(llama, None, plan, tmp_path / "out", ids[:1])
    assert write_pruned(llama, None, plan, tmp_path / "out").mended is None
