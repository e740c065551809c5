"""Block Influence against its definition in float64."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers import KINDS, make_tiny, states_of
from transformers import PreTrainedModel

from lyapunov_prune import block_influence
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.influence import InfluenceProfile, sublayer_influence
from lyapunov_prune.profiles.propagation import drawn_means
from lyapunov_prune.ranking.angular import angular_distance


@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_the_definition_in_float64(name: str, ids: torch.Tensor) -> None:
    model = make_tiny(name)
    found = block_influence(model, ids)
    states = states_of(model.double(), ids)
    influence, change = [], []
    for before, after in itertools.pairwise(states):
        influence.append(1 - torch.nn.functional.cosine_similarity(before, after, dim=-1).mean())
        change.append(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean())
    np.testing.assert_allclose(found.influence, influence, rtol=1e-4)
    np.testing.assert_allclose(found.change, change, rtol=1e-4)


def test_keeps_its_digits_when_a_layer_barely_turns(ids: torch.Tensor) -> None:
    """`1 - cos` in float32 would give 0 or 6e-8 here."""
    model = make_tiny("llama")
    layer = find_structure(model).layers[2]
    with torch.no_grad():
        layer.self_attn.o_proj.weight *= 1e-5
        layer.mlp.down_proj.weight *= 1e-5
    found = block_influence(model, ids).influence[2]
    states = states_of(model.double(), ids)
    expected = 1 - torch.nn.functional.cosine_similarity(states[2], states[3], dim=-1).mean()
    assert 0 < expected < 1e-7
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_a_layer_that_does_nothing_has_none(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    layer = find_structure(model).layers[2]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    found = block_influence(model, ids)
    assert found.influence[2] == 0
    assert found.change[2] == 0


def test_the_cosine_of_a_state_that_is_zero_counts_as_nothing(ids: torch.Tensor) -> None:
    """The embedding of a padding token is zero in many checkpoints; all are measured alike."""
    model = make_tiny("llama")
    ids = ids.clone()
    ids[1, 5] = 0
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.0
    states = states_of(model.double(), ids)
    cosine = torch.nn.functional.cosine_similarity(states[0], states[1], dim=-1)
    steps = (states[1] - states[0]).norm(dim=-1) / states[0].norm(dim=-1)
    found = block_influence(model, ids)
    np.testing.assert_allclose(found.influence[0], 1 - cosine.mean(), rtol=1e-9)
    np.testing.assert_allclose(found.change[0], torch.where(steps.isfinite(), steps, 0).mean(), rtol=1e-9)
    np.testing.assert_allclose(found.influence, angular_distance(model, ids).distance.diagonal(1), rtol=1e-9)
    at_attention = model.model.layers[0].post_attention_layernorm
    stream: list[torch.Tensor] = []
    with hooked(before=[(at_attention, lambda module, args, kwargs: stream.append(args[0]))]):
        attention = sublayer_influence(model, ids).attention[0]
    cosine = torch.nn.functional.cosine_similarity(states[0], torch.cat(stream[-len(ids) :]), dim=-1)
    np.testing.assert_allclose(attention, 1 - cosine.mean(), rtol=1e-9)


def test_a_state_that_stays_zero_is_not_turned(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    ids = torch.zeros_like(ids)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.0  # and no weight of a Llama adds anything to it
    for found in (block_influence(model, ids).influence, angular_distance(model, ids).distance):
        assert (found == 0).all()
    assert (block_influence(model, ids).change == 0).all()
    assert (sublayer_influence(model, ids).attention == 0).all()


def test_the_batch_size_changes_nothing(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    one, many = block_influence(llama, ids), block_influence(llama, ids, batch_size=3)
    np.testing.assert_allclose(one.influence, many.influence, rtol=1e-4)
    np.testing.assert_allclose(one.spread, many.spread, rtol=1e-3)


def test_bad_activations_are_named_by_layer(ids: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    with torch.no_grad():
        model.transformer.h[4].mlp.c_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="output of layer 4"):
        block_influence(model, ids)


def test_saves_and_loads(llama: PreTrainedModel, ids: torch.Tensor, tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = block_influence(llama, ids)
    assert str(InfluenceProfile.load(found.save(tmp_path / "bi.json"))) == str(found)


def test_the_spread_is_that_of_a_mean_of_windows(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = block_influence(llama, ids)
    each = np.array([block_influence(llama, window[None]).influence for window in ids])
    np.testing.assert_allclose(found.windows, each.T, rtol=1e-5)
    deviation = np.sqrt(((each - each.mean(0)) ** 2).sum(0) / (len(ids) - 1))
    np.testing.assert_allclose(found.spread, deviation / np.sqrt(len(ids)), rtol=1e-4)
    one = block_influence(llama, ids[:1])
    assert np.isnan(one.spread).all()
    assert one.drawn() is None


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
def test_bad_activations_of_sublayers_are_named_by_layer(layer: int, ids: torch.Tensor) -> None:
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
        with pytest.raises(LyapunovPruneError, match=f"SublayerInfluence, {name}"):
            dataclasses.replace(found, **{name: getattr(found, name)[1:]})
    for kind in ("attention", "mlp"):
        for windows in (
            {**found.windows, kind: found.windows[kind][1:]},
            {k: v for k, v in found.windows.items() if k != kind},
        ):
            with pytest.raises(LyapunovPruneError, match="windows"):
                dataclasses.replace(found, windows=windows)
