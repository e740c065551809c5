"""Places that can take a map, in every kind of layer; a layer that has none is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.zoo import make_zoo
from helpers import make_tiny
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.mending.fit import LinearMap
from lyapunov_prune.mending.mend import Mend, mapped, store_mend
from lyapunov_prune.mending.place import Part, find_place
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure

LAYER = 2
# What of the others is no linear map and its bias at the end of a layer.
KINDS: dict[str, tuple[Part, ...]] = {
    "bloom": (Part("mlp.dense_4h_to_h.weight", 0), Part("mlp.dense_4h_to_h.bias", 0)),  # adds the stream itself
    "mixtral": (Part("mlp.experts.down_proj", 1),),
    "gpt_oss": (Part("mlp.experts.down_proj", 2), Part("mlp.experts.down_proj_bias", 1)),
    "deepseek_v3": (Part("mlp.experts.down_proj", 1), Part("mlp.shared_experts.down_proj.weight", 0)),
    "gemma2": (Part("post_feedforward_layernorm.weight", 0, 1.0),),
    "olmo2": (Part("post_feedforward_layernorm.weight", 0),),
    "openai-gpt": (Part("ln_2.weight", 0), Part("ln_2.bias", 0)),
    "mamba": (Part("mixer.out_proj.weight", 0),),
    "cohere": (Part("mlp.down_proj.weight", 0),),
    "gpt2": (Part("mlp.c_proj.weight", 1), Part("mlp.c_proj.bias", 0)),
}


def last_state(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits.double()


def drawn(width: int, *, channels: bool, shifts: bool) -> LinearMap:
    g = torch.Generator().manual_seed(0)
    E = torch.randn(width, generator=g) if channels else torch.randn(width, width, generator=g) / width**0.5
    return LinearMap(0.3 * E.double(), torch.randn(width, generator=g).double() if shifts else None)


def require_taken(model: PreTrainedModel, ids: torch.Tensor, layer: int = LAYER) -> Any:
    """The place of a layer, once its parameters were seen to compute what the map computes by a hook."""
    place = find_place(wrap(model), layer)
    layers = find_structure(model).layers
    width = model.config.get_text_config(decoder=True).hidden_size
    mend = Mend(place, drawn(width, channels=place.channels, shifts=bool(place.shifts)))
    before = last_state(model, ids)
    with mapped(layers, [mend]):
        wanted = last_state(model, ids)
    assert float((wanted - before).norm()) > 1e-2 * float(before.norm())
    store_mend(layers[layer], mend)
    assert float((last_state(model, ids) - wanted).norm()) < 1e-5 * float(wanted.norm())
    return place


def test_every_family_has_one(family: str, ids: torch.Tensor) -> None:
    place = require_taken(make_tiny(family), ids)
    assert place.layer == LAYER
    assert place.channels is (family in ("gemma2", "gemma3"))


@pytest.mark.parametrize("name", list(KINDS))
def test_kinds_of_layers(name: str, ids: torch.Tensor) -> None:
    layer = 5 if name == "deepseek_v3" else LAYER  # its first layers have no experts
    assert require_taken(make_zoo(name), ids % 90, layer).parts == KINDS[name]


def test_weights_of_a_norm_that_dwarf_one_do_not_hide_the_one(ids: torch.Tensor) -> None:
    """Gemma 3 270M has weights up to 689, of which `w` and `1 + w` differ by less than a trial's tolerance."""
    model = make_zoo("gemma2")
    layer: Any = find_structure(model).layers[LAYER]
    with torch.no_grad():
        layer.post_feedforward_layernorm.weight.mul_(100).add_(300)
    assert require_taken(model, ids).parts == KINDS["gemma2"]


def test_the_layer_itself_is_left_as_it_was(ids: torch.Tensor) -> None:
    model = make_zoo("gemma2").bfloat16()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    find_place(wrap(model), LAYER)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_branch_that_is_scaled_says_by_what(ids: torch.Tensor) -> None:
    model = make_zoo("granite")
    layer: Any = find_structure(model).layers[LAYER]
    layer.residual_multiplier = 0.5
    assert find_place(wrap(model), LAYER).scale == pytest.approx(0.5, rel=1e-4)


def test_a_layer_without_one_is_refused() -> None:
    with pytest.raises(LyapunovPruneError, match=r"layer 2 \(RwkvBlock\)"):
        find_place(wrap(make_zoo("rwkv")), LAYER)


def test_what_another_layer_has_too_is_not_taken() -> None:
    model = make_tiny("llama")
    layers: Any = find_structure(model).layers
    layers[LAYER].mlp.down_proj.weight = layers[0].mlp.down_proj.weight
    with pytest.raises(LyapunovPruneError, match="no matrix of layer 2"):
        find_place(wrap(model), LAYER)


def test_a_last_module_that_is_not_linear_is_passed_over() -> None:
    """What follows the last matrix may square it: a hidden layer's map is no map of the output then."""
    model = make_tiny("llama")

    class Squared(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) ** 2

    layer: Any = find_structure(model).layers[LAYER]
    old = layer.mlp.down_proj
    layer.mlp.down_proj = Squared(old.in_features, old.out_features, bias=False)
    with pytest.raises(LyapunovPruneError, match="no matrix of layer 2"):
        find_place(wrap(model), LAYER)
