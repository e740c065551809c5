"""Experts that the router sends few tokens or none are calibrated on others of their layer, and the report says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import moe

from lyapunov_prune import compress
from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections


@pytest.fixture
def mixtral() -> Any:
    """The router of its second layer never chooses expert 3."""
    model: Any = moe("mixtral")

    def others(module: Any, args: Any, output: Any) -> Any:
        logits, weights, _ = output
        first = torch.arange(len(logits)) % 3
        return logits, weights, torch.stack([first, (first + 1) % 3], 1)

    model.model.layers[1].mlp.gate.register_forward_hook(others)
    return model


def test_an_expert_without_tokens_is_lent_the_first_of_its_layer(mixtral: Any) -> None:
    ids, x = torch.arange(3, 43).view(2, 20), []
    experts = mixtral.model.layers[1].mlp.experts
    handle = experts.register_forward_pre_hook(lambda m, a: x.append(a))
    norms = input_norms(mixtral, ids, find_projections(wrap(mixtral)))
    handle.remove()
    calls = [a for a in x if a[1].shape[1] == 2]  # those with lent tokens go to all experts at once
    assert not any((a[1] == 3).any() for a in calls)
    weight = torch.cat([a[2] for a in calls]).double().square().mean().sqrt()
    wanted = torch.cat([a[0] for a in calls])[:32].double().norm(dim=0) * weight
    torch.testing.assert_close(norms["model.layers.1.mlp.experts.gate_up_proj:3"], wanted)


@pytest.mark.parametrize(("method", "amount"), [("wanda", {"sparsity": 0.5}), ("balanced", {"rank": 4})])
def test_the_report_says_which_experts_got_few(mixtral: Any, method: str, amount: dict[str, Any]) -> None:
    report = compress(mixtral, torch.arange(3, 43).view(2, 20), method=method, **amount).report
    told = {m.name: m for m in report.matrices}
    none = told["model.layers.1.mlp.experts.down_proj:3"]
    assert (none.tokens, none.lent) == (0, True)
    assert told["model.layers.1.self_attn.q_proj"].tokens is None
    sent = [m.tokens for m in report.matrices if m.layer == 1 and m.component.endswith("down_proj")]
    assert sum(t or 0 for t in sent) == 2 * 40
    assert any(f"{sum(m.lent for m in report.matrices)} matrices of experts" in line for line in report.answer())
    plenty = compress(mixtral, torch.arange(3, 43).view(2, 20), method="magnitude", sparsity=0.5).report
    assert not any(m.lent for m in plenty.matrices)
