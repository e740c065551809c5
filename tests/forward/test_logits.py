"""How far logits are from their reference."""

from __future__ import annotations

import pytest
import torch

from lyapunov_prune.forward.logits import deviation


def test_masked_tokens_hide_no_difference() -> None:
    """One mask of −1e30 in a row made every other deviation 0, and gates passed whatever was planted."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = logits + 0.1 * torch.randn(3, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    masks = torch.full((3, 8), -1e30, dtype=torch.float64)
    wanted = ((other - logits).norm(dim=-1) / (logits - logits.mean(-1, keepdim=True)).norm(dim=-1)).max()
    found = deviation(torch.cat([other, 2 * masks], -1), torch.cat([logits, masks], -1))
    assert found == pytest.approx(float(wanted), rel=1e-12)
    assert deviation(torch.cat([logits, -masks / 1e30], -1), torch.cat([logits, masks], -1)) > 1
    assert deviation(torch.cat([logits, masks], -1), torch.cat([logits, 0 * masks], -1)) > 1
