"""A merged block in a plain checkpoint: exact where σ(x) − σ(−x) = x, refused in one line where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_tiny, moe, operated
from torch import nn
from transformers.activations import ACT2FN

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.logits import deviation, uncached_logits
from lyapunov_prune.merging.merge import merge_layers
from lyapunov_prune.merging.replaced import hidden_replaced
from lyapunov_prune.models.structure import find_layers, find_structure
from lyapunov_prune.pruning.mirroring import _is_odd_half, require_mirrored
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import verify_removal

WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 70},
    "gpt_neox": {"intermediate_size": 64},
    "opt": {"ffn_dim": 80},
}
LOST = (1, 4)


@pytest.mark.parametrize(
    ("name", "holds"),
    [(name, True) for name in ("gelu", "gelu_new", "gelu_fast", "quick_gelu", "gelu_pytorch_tanh", "silu", "relu")]
    + [(name, False) for name in ("tanh", "sigmoid", "relu2", "leaky_relu", "mish", "relu6", "gelu_10")],
)
def test_which_activations_have_the_identity(name: str, holds: bool) -> None:
    assert _is_odd_half(ACT2FN[name]) is holds


@pytest.mark.parametrize("reduction", ["identity", "affine"])
@pytest.mark.parametrize("name", list(WIDE))
def test_the_block_computes_the_merged_map(name: str, reduction: str, ids: torch.Tensor) -> None:
    model = make_tiny(name, **WIDE[name]).double()
    merged = merge_layers(model, ids, LOST, reduction)
    plan = PruningPlan.given(model, [2], drop_attention=[0], drop_activation=LOST, reduction=reduction)
    alone = PruningPlan.given(model, drop_activation=LOST, reduction=reduction)
    with torch.no_grad(), hidden_replaced(find_layers(model).layers, [(m.block, m.tau) for m in merged]):
        wanted = uncached_logits(model, ids)
    made = operated(model, alone, merged)
    with torch.no_grad():
        assert deviation(uncached_logits(made, ids), wanted) < 1e-12
        assert deviation(uncached_logits(model, ids), wanted) > 1e-3  # and it does something
    assert made.num_parameters() == model.num_parameters()
    assert type(made) is type(model)
    report = verify_removal(model, operated(model, plan, merged), plan, ids, merged=merged)
    assert report.passed, f"\n{report}"


def test_a_matrix_with_the_wrong_sign_fails_the_gate(ids: torch.Tensor) -> None:
    model = make_tiny("opt", **WIDE["opt"])
    merged = merge_layers(model, ids, LOST, "identity")
    plan = PruningPlan.given(model, drop_activation=LOST, reduction="identity")
    made = operated(model, plan, merged)
    layer: Any = find_layers(made).layers[LOST[0]]
    with torch.no_grad():
        layer.fc2.weight[:, 32:64] *= -1
    assert "same as skipping" in verify_removal(model, made, plan, ids, merged=merged).failure()


def test_what_cannot_hold_it_is_refused(ids: torch.Tensor) -> None:
    remedy = "give format='compact'$"
    with pytest.raises(LyapunovPruneError, match=f"layer 1 is gated, .*{remedy}"):
        require_mirrored(find_structure(make_tiny("llama")), [1])
    with pytest.raises(LyapunovPruneError, match=f"63 hidden units.*{remedy}"):
        require_mirrored(find_structure(make_tiny("opt", ffn_dim=63)), [1])
    bent = make_tiny("gpt2", **WIDE["gpt2"], activation_function="tanh")
    with pytest.raises(LyapunovPruneError, match=f"Tanh, .*{remedy}"):
        require_mirrored(find_structure(bent), [1])
    with pytest.raises(LyapunovPruneError, match="layer 1 has experts"):
        require_mirrored(find_structure(moe("mixtral")), [1])
    model = make_tiny("opt", **WIDE["opt"], enable_bias=False)
    plan = PruningPlan.given(model, drop_activation=[1], reduction="affine")
    with pytest.raises(LyapunovPruneError, match=f"layer 1 has no bias.*{remedy}"):
        operated(model, plan, merge_layers(model, ids, [1], "affine"))


def test_an_activation_with_weights_is_asked_as_it_is() -> None:
    assert not _is_odd_half(nn.PReLU(dtype=torch.bfloat16))


def test_a_plan_and_its_merges_belong_together(ids: torch.Tensor) -> None:
    model = make_tiny("opt", **WIDE["opt"])
    plan = PruningPlan.given(model, drop_activation=[1], reduction="identity")
    for merged in ((), merge_layers(model, ids, [2], "identity")):
        for call in (lambda m: operated(model, plan, m), lambda m: verify_removal(model, model, plan, merged=m)):
            with pytest.raises(LyapunovPruneError, match=r"layers \[1\]"):
                call(merged)
