"""`roughness` against rounding that is measured, casts where they do and do not count, and what is chosen."""

from __future__ import annotations

import pytest
import torch
from families.zoo import make_zoo
from helpers import KINDS, OTHERS, make_other, make_tiny, states_of
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.forward.rounding import roughness
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.propagation import direction


def found(model: PreTrainedModel, ids: torch.Tensor) -> torch.dtype:
    with torch.no_grad():
        return roughness(find_structure(model), ids, model.dtype).coarsest


def unevenness(model: PreTrainedModel, ids: torch.Tensor, step: float = 1e-6) -> float:
    """Largest `‖h(x + d) + h(x − d) − 2 h(x)‖ / ‖h(x)‖` behind a layer, `‖d‖ = step ‖x‖`: a second difference.

    Of a smooth function it is of the order of `step²`; what is more was rounded on the way.
    """
    clean = states_of(model, ids)
    d = step * direction(clean[0].float(), 0, 0).double()
    there, back = states_of(model, ids, d), states_of(model, ids, -d)
    return max(float((a + b - 2 * h).norm() / h.norm()) for a, b, h in list(zip(there, back, clean, strict=True))[1:])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_agrees_with_the_rounding_that_is_there(name: str, attention: str, ids: torch.Tensor) -> None:
    """Each family in float64 rounds to float32 exactly where its outputs are too rough for float64."""
    model = (make_tiny(name) if name in KINDS else make_other(name)).double()
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip("this family has no other attention")
    model.set_attn_implementation(attention)
    rough = unevenness(model, ids[:1])
    assert rough < 1e-11 or rough > 1e-8  # far from either side, so that the answer is clear
    assert found(model, ids) == (torch.float32 if rough > 1e-8 else torch.float64)


CHOOSING = ("mixtral", "qwen3_moe", "phimoe", "llama4_text", "gpt_oss", "jetmoe", "dbrx", "zaya", "longcat_flash")


@pytest.mark.parametrize("name", [*CHOOSING, "deepseek_v32", "llama", "gpt2", "gemma3_text", "mamba", "rwkv"])
def test_layers_that_choose_experts_or_tokens_are_told(name: str, ids: torch.Tensor) -> None:
    model = make_zoo(name)
    with torch.no_grad():
        chooses = roughness(find_structure(model), ids, model.dtype).chooses
    assert chooses == (name in (*CHOOSING, "deepseek_v32"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_in_float32_refine_no_narrower_model(dtype: torch.dtype, ids: torch.Tensor) -> None:
    assert found(make_tiny("llama").to(dtype), ids) == dtype


def test_autocast_is_seen(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    with torch.autocast("cpu", torch.bfloat16):
        assert found(model, ids) == torch.bfloat16
    assert found(model, ids) == torch.float32


@pytest.mark.parametrize(("inside", "expected"), [(True, torch.float16), (False, torch.float64)])
def test_only_what_stands_inside_the_layers_counts(inside: bool, expected: torch.dtype, ids: torch.Tensor) -> None:
    """The planted cast: one in a layer is the coarsest, the same before or after all layers rounds no difference."""
    model = make_tiny("gpt2").double()
    model.set_attn_implementation("sdpa")
    backbone = find_structure(model).backbone
    rounds = [find_structure(model).layers[3].mlp] if inside else [backbone.wte, backbone.ln_f]

    def cast(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output.half().double()

    for module in rounds:
        module.register_forward_hook(cast)
    assert found(model, ids) == expected
