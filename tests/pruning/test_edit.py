"""An edit in memory: what it keeps, what it copies, and that two in turn are one."""

from __future__ import annotations

import pytest
import torch
from families.zoo import make_zoo
from helpers import MIXTURES, make_mixture, make_tiny, operated
from torch import nn

from lyapunov_prune import LyapunovPruneError, remove_layers
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.edit import edit_of, filled
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import ExpertsGone


def test_two_edits_in_turn_are_one(family: str) -> None:
    """Layers 1 and 4 of six: after layer 1 is gone, layer 4 is the third."""
    if family == "gpt2-inverse-layer":  # its weights are rounded twice
        pytest.skip("the family's removal computes with weights")
    model = make_tiny(family)
    once, twice = operated(model, [1, 4]), operated(operated(model, [1]), [3])
    assert once.config.to_dict() == twice.config.to_dict()
    for (name, a), (other, b) in zip(once.state_dict().items(), twice.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", MIXTURES)
def test_layers_and_experts_in_turn_go_as_together(name: str) -> None:
    model = make_mixture(name)
    mixtures, last = wrap(model).mixtures.layers, find_structure(model).num_layers - 1
    fewer = {layer: (0, 5) for layer in mixtures if layer != last}
    shallow = operated(model, [last])
    together = operated(model, PruningPlan.given(model, ExpertsGone((last,), fewer)))
    in_turn = operated(shallow, PruningPlan.given(shallow, ExpertsGone((), fewer)))
    assert together.config.to_dict() == in_turn.config.to_dict()
    assert all(torch.equal(a, in_turn.state_dict()[key]) for key, a in together.state_dict().items())


def test_modes_gradients_ties_and_dtypes_are_those_of_the_original() -> None:
    model = make_tiny("gemma3").to(torch.bfloat16)
    layers = find_structure(model).layers
    layers[2].mlp.train()
    layers[2].mlp.up_proj.weight.requires_grad_(False)
    layers[3].mlp.up_proj.weight = layers[2].mlp.up_proj.weight
    decoder = wrap(model)
    for shared in (False, True):
        made = filled(edit_of(decoder, PruningPlan.given(decoder, [1])), decoder, shared=shared)
        after = made.layers
        assert after[1].mlp.training
        assert not after[1].mlp.up_proj.weight.requires_grad
        assert after[2].mlp.up_proj.weight is after[1].mlp.up_proj.weight
        assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
        assert made.model.lm_head.weight is made.model.get_input_embeddings().weight
        assert (after[0].mlp.up_proj.weight.data_ptr() == layers[0].mlp.up_proj.weight.data_ptr()) == shared


@pytest.mark.parametrize("path", ["mlp.act_fn", "mlp.up_proj"])
def test_what_a_checkpoint_would_lose_is_refused(path: str) -> None:
    """A module that somebody put in the place of the class's own."""
    model = make_zoo("llama")
    layer = find_structure(model).layers[4]
    layer.set_submodule(path, nn.Tanh() if path.endswith("fn") else nn.Linear(32, 47, bias=False))
    with pytest.raises(LyapunovPruneError, match=path):
        remove_layers(model, [1])
