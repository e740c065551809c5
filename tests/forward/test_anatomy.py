"""The parts of a layer, found by running it, in families that keep them in different places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_gate import verify_compact
from lyapunov_prune.forward.anatomy import find_anatomy, find_attentions, replaced, silent, standing_in
from lyapunov_prune.forward.hooks import residual_stream, run_backbone
from lyapunov_prune.forward.logits import cached_logits, deviation, last_logits, uncached_logits
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.profiles import sublayer_influence

PLACES: dict[str, dict[str, str]] = {
    "bert": {"attention.self": "none", "attention.output.dense": "identity"},  # the norm behind the sum stays
    "dbrx": {"norm_attn_norm.attn": "none", "norm_attn_norm.norm_1": "identity"},
    "gemma2": {"self_attn": "none", "input_layernorm": "identity", "post_attention_layernorm": "identity"},
    "gptj": {"attn": "none"},  # the norm feeds the MLP too
    "lfm2": {"conv": "none 0", "operator_norm": "identity"},
    "mamba2": {"mixer": "none 0"},  # the layer reads its norm's dtype
    "openai-gpt": {"attn": "none 1 list"},  # the norm follows the sum
    "zaya": {"self_attn": "none"},  # the layer reads its norm's dtype
}


@pytest.mark.parametrize("name", PLACES)
def test_places_by_family(name: str) -> None:
    decoder = wrap(make_zoo(name))
    (attention,) = find_attentions(decoder, find_anatomy(decoder, (3,))).values()
    assert attention.places == PLACES[name]


# By family: the modules where the stream enters and leaves each part; `whole` if they are all that the layer adds.
PARTS: dict[str, tuple[dict[str, list[tuple[str, str]]], bool]] = {
    "bart": ({"attention": [("self_attn", "self_attn")]}, False),  # the attention to an encoder does not run
    "bert": ({"attention": [("attention.self", "attention.output.dense")]}, False),
    "bloom": ({}, False),  # both add the stream themselves
    "dbrx": (
        {"attention": [("norm_attn_norm.norm_1", "norm_attn_norm.attn")], "mlp": [("norm_attn_norm.norm_2", "ffn")]},
        True,
    ),
    "falcon_h1": (
        {
            "attention": [("input_layernorm", "mamba"), ("self_attn", "self_attn")],
            "mlp": [("pre_ff_layernorm", "feed_forward")],
        },
        True,
    ),
    "rwkv": ({"attention": [("ln1", "attention")], "mlp": [("ln2", "feed_forward")]}, True),  # both mix tokens
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_by_family(name: str) -> None:
    decoder = wrap(make_zoo(name))
    (found,) = find_anatomy(decoder, (3,)).values()
    names = {module: path for path, module in decoder.layers[3].named_modules()}
    ends = {
        kind: [(names[branch.entry], names[branch.exit]) for branch in part.branches]
        for kind, part in found.parts.items()
    }
    assert (ends, bool(found.whole)) == PARTS[name]


def test_mixers_side_by_side_are_one_attention() -> None:
    """Falcon H1: without its parts a layer passes its state on, and BI measures it before the MLP."""
    decoder, ids = wrap(make_zoo("falcon_h1")), torch.arange(24).view(2, 12)
    (found,) = find_anatomy(decoder, (3,)).values()
    states: list[torch.Tensor] = []
    with silent(*found.parts.values()), residual_stream(decoder.structure, lambda _, h: states.append(h)):
        run_backbone(decoder.structure, ids)
    assert torch.equal(states[3], states[4])
    assert np.isfinite(sublayer_influence(decoder, ids).attention).all()


@pytest.mark.parametrize(
    ("name", "output"),
    [("bert", "attention.output.dense"), ("gptj", "attn"), ("cohere", "self_attn"), ("granitemoeshared", "self_attn")],
)
def test_the_compact_model_is_the_one_in_which_a_named_module_returns_zeros(name: str, output: str) -> None:
    model = make_zoo(name)
    model = model if "moe" in name else model.double()
    ids = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))

    def zero(module: nn.Module, args: tuple[Any, ...], returned: Any) -> Any:
        return 0 * returned if isinstance(returned, torch.Tensor) else (0 * returned[0], *returned[1:])

    compact = make_compact(model, Cuts((0, 3)))
    layers = wrap(model).layers
    with torch.no_grad():
        for index in (0, 3):
            layers[index].get_submodule(output).register_forward_hook(zero)
        assert torch.equal(uncached_logits(compact, ids), uncached_logits(model, ids))
        stepped = cached_logits(compact, ids, positions=True)
        assert stepped is not None
        assert deviation(stepped, last_logits(compact, ids)) < (1e-3 if "moe" in name else 1e-5)


def test_a_shared_norm_that_leaves_fails_the_gate() -> None:
    model, cuts = make_zoo("gptj"), Cuts((3,))
    compact = make_compact(model, cuts)
    compact.transformer.h[3].ln_1 = nn.Identity()
    assert "same as skipping" in verify_compact(model, compact, cuts, elsewhere=False).failure()


def test_modules_stand_in_a_layer_inside_the_block_alone() -> None:
    layer = wrap(make_zoo("llama")).layers[2]
    before = dict(layer.named_modules())
    with standing_in(layer, replaced(layer, {"self_attn": "none"}, 32)):
        assert dict(layer.named_modules())["self_attn"] is not before["self_attn"]
    assert dict(layer.named_modules()) == before


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("bloom", 3, "returns more than what is added"),
        ("gemma4_text", 5, "reads more than the state"),
        ("inkling_text", 3, "read the cache"),
        ("longcat_flash", 3, "16 entries for 8 layers"),
        ("minimax", 3, "MiniMaxCache"),
        ("nemotron_h", 3, "no module of layer 3 mixes"),
        ("zamba2", 3, "share"),
    ],
)
def test_refused_with_what_the_family_does(name: str, layer: int, message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        make_compact(make_zoo(name), Cuts((layer,)))
