"""The residual stream: what is seen, in which order, and that nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from families.zoo import make_zoo
from helpers import LAYERS, hooks_of, make_tiny, states_of
from transformers import PreTrainedModel

from lyapunov_prune import (
    LyapunovPruneError,
    block_influence,
    check_bounds,
    measure_contraction,
    perplexity,
    remove_layers,
    verify_removal,
)
from lyapunov_prune.forward.hooks import (
    layer_input,
    require_finite,
    residual_stream,
    run_backbone,
    skipped,
    with_hidden,
)
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.width import choose_channels
from lyapunov_prune.ranking.angular import angular_distance


def test_sees_every_boundary_once_in_order(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    seen: list[tuple[int, torch.Tensor]] = []
    with residual_stream(find_structure(model), lambda layer, h: seen.append((layer, h))), torch.no_grad():
        model(ids, use_cache=False)
    assert [layer for layer, _ in seen] == list(range(LAYERS + 1))
    for (_, found), expected in zip(seen, states_of(model, ids), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "measure",
    [measure_contraction, block_influence, angular_distance, check_bounds, partial(choose_channels, remove=0.25)],
)
def test_a_layer_that_text_does_not_run_is_named(measure: Callable[..., object], ids: torch.Tensor) -> None:
    """Mllama's layers 3 and 6 look at an image: states that were counted from the first would be those of others."""
    model = make_zoo("mllama")
    with pytest.raises(LyapunovPruneError, match="layer 3 of Mllama"):
        measure(model, ids[:1, :8])
    assert hooks_of(model) == 0
    seen: list[int] = []
    structure = find_structure(model)
    with torch.no_grad(), residual_stream(structure, lambda layer, _: seen.append(layer), every_layer=False):
        run_backbone(structure, ids[:1, :8])
    assert seen == [0, 1, 2, 3, 5, 6, 8]


def test_the_last_state_is_before_the_final_norm(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    seen: dict[int, torch.Tensor] = {}
    with residual_stream(find_structure(llama), lambda layer, h: seen.update({layer: h})), torch.no_grad():
        after = llama.model(ids).last_hidden_state
    torch.testing.assert_close(llama.model.norm(seen[LAYERS]), after)
    assert not torch.allclose(seen[LAYERS], after)


def test_a_final_norm_that_gives_nothing_finite_is_named(ids: torch.Tensor) -> None:
    """Embeddings of NaN would be neighbours of nothing, and a broken model score 0."""
    model = make_tiny("llama")
    require_finite(find_structure(model), ids, "a text")
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(LyapunovPruneError, match="final norm"):
        require_finite(find_structure(model), ids, "a text")


def test_inject_replaces_the_first_state(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    seen: dict[int, torch.Tensor] = {}
    stream = residual_stream(find_structure(llama), lambda layer, h: seen.update({layer: h}), torch.zeros_like)
    with stream, torch.no_grad():
        llama(ids)
    assert (seen[0] == 0).all()


def test_hooks_are_gone_after_an_exception(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    def fail(layer: int, hidden: torch.Tensor) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), residual_stream(find_structure(llama), fail):
        llama(ids)
    with pytest.raises(RuntimeError, match="planted"), skipped(find_structure(llama), (1, 2)):
        raise RuntimeError("planted")
    assert hooks_of(llama) == 0


def test_measuring_leaves_nothing_behind(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_contraction(model, ids, seeds=(0,))
    block_influence(model, ids)
    assert hooks_of(model) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_dropout_is_no_error_of_the_model(ids: torch.Tensor) -> None:
    """`from_config` returns models in training mode; each measurement sets eval mode and restores it."""
    model = make_tiny("gpt2")
    expected = measure_contraction(model, ids).rho, block_influence(model, ids).influence, perplexity(model, ids).nll
    model.train()
    model.transformer.h[1].eval()
    found = measure_contraction(model, ids).rho, block_influence(model, ids).influence, perplexity(model, ids).nll
    assert all((a == b).all() for a, b in zip(map(torch.tensor, found), map(torch.tensor, expected), strict=True))
    assert verify_removal(model, remove_layers(model, [2]), [2], ids).passed
    assert model.training
    assert not model.transformer.h[1].training


def test_a_hook_left_behind_is_noticed(llama: PreTrainedModel) -> None:
    """The planted fault for the two tests above."""
    handle = find_structure(llama).layers[0].register_forward_hook(lambda *_: None)
    assert hooks_of(llama) == 1
    handle.remove()


def test_skipping_a_layer_passes_its_input_on(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    seen: dict[int, torch.Tensor] = {}
    structure = find_structure(model)
    # The stream's hooks run after the skipping ones: they are registered later.
    with (
        skipped(structure, (2,)),
        residual_stream(structure, lambda layer, h: seen.update({layer: h})),
        torch.no_grad(),
    ):
        model(ids, use_cache=False)
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[3], seen[4])


def test_tuples_keep_their_form() -> None:
    new = torch.ones(2)
    assert with_hidden(torch.zeros(2), new) is new
    assert with_hidden((torch.zeros(2), "cache"), new) == (new, "cache")


def test_a_layer_called_by_keyword_is_understood() -> None:
    x = torch.ones(1)
    assert layer_input((), {"hidden_states": x}) is x
    assert layer_input((x,), {}) is x
    with pytest.raises(LyapunovPruneError, match="without hidden states"):
        layer_input((), {})


class _Named(NamedTuple):
    hidden_states: torch.Tensor
    second: torch.Tensor


def test_states_by_name_are_not_guessed(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    handle = find_structure(llama).layers[1].register_forward_hook(lambda module, args, out: _Named(out, out))
    try:
        with skipped(find_structure(llama), (1,)), pytest.raises(LyapunovPruneError, match="hidden_states, second"):
            llama(ids, use_cache=False)
    finally:
        handle.remove()


def test_a_layer_s_list_stays_a_list() -> None:
    """GPT-1 adds what its attention hands out to a list."""
    hidden = torch.ones(1, 2, 3)
    assert with_hidden([torch.zeros(1, 2, 3), 4], hidden) == [hidden, 4]
    assert with_hidden((torch.zeros(1, 2, 3), 4), hidden) == (hidden, 4)
    assert with_hidden(torch.zeros(1, 2, 3), hidden) is hidden
