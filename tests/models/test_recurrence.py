"""Where states are carried: one kind of cache each, and how long a convolution's inputs stay there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.zoo import make_zoo

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.forward.logits import cache_of
from lyapunov_prune.models.recurrence import carried_states, first_cache, forget_states, select_rows
from lyapunov_prune.models.structure import find_structure

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def begun(name: str) -> tuple[Any, Any, dict[str, Any], Any]:
    """A model, its structure, and its cache after `IDS`: as the forward takes it, and by itself."""
    model = make_zoo(name)
    structure = find_structure(model)
    given = first_cache(model, structure)
    carried = cache_of(model, model(IDS, use_cache=True, **given)) or given
    return model, structure, carried, next(iter(carried.values()))


@pytest.mark.parametrize(
    ("name", "layers", "convolution"),
    [
        ("mamba2", range(8), False),
        ("granitemoehybrid", (0, 1, 3, 4, 6), False),
        ("lfm2", (0, 1, 3, 4, 5, 7), True),
        ("minimax", (1, 3, 5, 7), False),
        ("recurrent_gemma", (0, 1, 3, 4, 5, 7), False),
    ],
)
@torch.no_grad()
def test_states_are_found_and_rows_selected(name: str, layers: Any, convolution: bool) -> None:
    _, structure, _, cache = begun(name)
    states = carried_states(structure, cache)
    assert tuple(states) == tuple(layers)
    assert {state.convolution for state in states.values()} == {convolution}
    before = [state.read().clone() for state in states.values()]
    select_rows(structure, cache, torch.tensor([1, 1, 0]))
    for state, was in zip(states.values(), before, strict=True):
        torch.testing.assert_close(state.read(), was[[1, 1, 0]], rtol=0, atol=0)


@torch.no_grad()
def test_states_in_modules_are_forgotten() -> None:
    model, structure, _, _ = begun("recurrent_gemma")
    block: Any = structure.layers[0]
    assert block.temporal_block.rg_lru.recurrent_states is not None
    forget_states(structure)
    assert block.temporal_block.rg_lru.recurrent_states is None
    assert model(IDS, use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "lfm2"])
@torch.no_grad()
def test_what_a_convolution_keeps_is_gone_after_its_width(name: str) -> None:
    """Of the first layer, which nothing below disturbs: bit for bit, once as many tokens came as its kernel is wide."""
    kept = []
    for moved in (False, True):
        model, _, carried, cache = begun(name)
        convolution = cache.layers[0].conv_states
        if moved:
            convolution[0] = convolution[0] + 1.0
        seen = []
        for t in range(convolution[0].shape[-1]):
            model(IDS[:, t : t + 1], use_cache=True, **carried)
            seen.append(convolution[0].clone())
        kept.append(seen)
    differ = [not torch.equal(a, b) for a, b in zip(*kept, strict=True)]
    assert differ == [True] * (len(differ) - 1) + [False]


@torch.no_grad()
def test_a_model_without_states_and_one_of_another_scale_are_refused() -> None:
    _, structure, _, cache = begun("llama")
    with pytest.raises(LyapunovPruneError, match="keys and values"):
        carried_states(structure, cache)
    for name in ("rwkv", "xlstm"):
        with pytest.raises(LyapunovPruneError, match=f"state of {name} .* running maximum"):
            begun(name)
