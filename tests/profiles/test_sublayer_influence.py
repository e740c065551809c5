"""Block Influence of attention and MLP: every window by its own states in float64, and the spread over windows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.profiles.propagation import drawn_means
from lyapunov_prune.profiles.sublayer_influence import sublayer_influence


def by_definition(model: PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    """`1 − mean_t cos` of one window before and behind each branch of a Llama, (2, L)."""
    wide: Any = model.double()
    rows: list[tuple[float, float]] = []

    def turn(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).mean())

    entered: list[torch.Tensor] = []
    handles = []
    for layer in wide.model.layers:
        handles.append(layer.register_forward_pre_hook(lambda m, args: entered.append(args[0])))
        handles.append(
            layer.post_attention_layernorm.register_forward_pre_hook(lambda m, args: entered.append(args[0]))
        )

        def leave(module: Any, args: Any, output: Any) -> None:
            before, between = entered
            after = output if isinstance(output, torch.Tensor) else output[0]
            rows.append((turn(before, between), turn(between, after)))
            entered.clear()

        handles.append(layer.register_forward_hook(leave))
    with torch.no_grad():
        wide(ids)
    for handle in handles:
        handle.remove()
    return np.array(rows).T


@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_window_is_that_of_its_states(batch_size: int) -> None:
    ids = torch.randint(97, (3, 12), generator=torch.Generator().manual_seed(4))
    found = sublayer_influence(make_tiny("llama"), ids, batch_size=batch_size)
    each = np.array([by_definition(make_tiny("llama"), window[None]) for window in ids])  # (windows, 2, L)
    assert found.windows is not None
    for k, kind in enumerate(("attention", "mlp")):
        np.testing.assert_allclose(found.windows[kind], each[:, k].T, rtol=1e-4)
        np.testing.assert_allclose(getattr(found, kind), each[:, k].mean(0), rtol=1e-4)
        deviation = np.sqrt(((each[:, k] - each[:, k].mean(0)) ** 2).sum(0) / 2)
        np.testing.assert_allclose(getattr(found, f"{kind}_spread"), deviation / np.sqrt(3), rtol=1e-3)
    frame = found.to_frame()
    np.testing.assert_array_equal(frame["mlp_error"], found.mlp_spread)
    np.testing.assert_array_equal(frame["attention_error"], found.attention_spread)
    for kind in ("attention", "mlp"):
        drawn = found.drawn(kind)
        assert drawn is not None
        np.testing.assert_array_equal(drawn, drawn_means(found.windows[kind]))


def test_one_window_has_no_spread(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = sublayer_influence(llama, ids[:1])
    assert np.isnan(found.attention_spread).all()
    assert np.isnan(found.mlp_spread).all()
    assert found.drawn("mlp") is None
    assert dataclasses.replace(found, windows=None).drawn("attention") is None


@pytest.mark.parametrize("layer", [0, 3])
def test_bad_activations_are_named_by_layer(layer: int, ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    with torch.no_grad():
        model.model.layers[layer].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError) as caught:
        sublayer_influence(model, ids[:1])
    assert caught.value.layer == layer + 1


def test_arrays_of_another_length_are_refused(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = sublayer_influence(llama, ids[:2])
    assert found.windows is not None
    for name in ("attention", "mlp", "attention_spread", "mlp_spread"):
        with pytest.raises(LyapunovPruneError, match=f"Block Influence, {name}"):
            dataclasses.replace(found, **{name: getattr(found, name)[1:]})
    for kind in ("attention", "mlp"):
        for windows in (
            {**found.windows, kind: found.windows[kind][1:]},
            {k: v for k, v in found.windows.items() if k != kind},
        ):
            with pytest.raises(LyapunovPruneError, match=f"windows of {kind}"):
                dataclasses.replace(found, windows=windows)
