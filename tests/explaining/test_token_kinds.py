"""How far state, logits and probabilities turn, by kind of token, against plain sums in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_tiny
from transformers import PreTrainedTokenizerFast

from lyapunov_prune.explaining.explain import explain
from lyapunov_prune.explaining.token_kinds import FIRST, KINDS
from lyapunov_prune.models.decoder import wrap


def one_minus_cos(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    return (1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).numpy()


def test_each_kind_has_the_mean_of_its_positions(tokenizer: PreTrainedTokenizerFast) -> None:
    dense = make_tiny("llama", vocab_size=len(VOCABULARY)).double()
    other = copy.deepcopy(dense)
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight.mul_(1.2)
    text = "in 1984 the 7 cats ran 23 miles; the cats ran and ran"
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)[: 2 * 20].view(2, -1)
    found = explain(wrap(dense, tokenizer), other, ids).tokens
    assert found is not None
    with torch.no_grad():
        states = [model.model(ids).last_hidden_state[:, :-1].flatten(0, 1) for model in (dense, other)]
        logits = [model(ids).logits[:, :-1].flatten(0, 1) for model in (dense, other)]
    log_p, log_q = (z.log_softmax(-1) for z in logits)
    measured = [one_minus_cos(*states), one_minus_cos(*logits), one_minus_cos(log_p.exp(), log_q.exp())]
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).numpy()
    wanted = ids[:, 1:].flatten().tolist()
    every = ids.flatten().tolist()
    first = np.arange(len(wanted)) % (ids.shape[1] - 1) < FIRST
    rare = np.array([every.count(i) == 1 for i in wanted])
    number = np.array([any(c in "0123456789" for c in tokenizer.decode([i])) for i in wanted])
    kinds = [np.ones_like(first), first, rare, number, ~(first | rare | number)]
    assert all(kind.any() for kind in kinds)
    np.testing.assert_array_equal(found.positions, [kind.sum() for kind in kinds])
    for k, kind in enumerate(kinds):
        np.testing.assert_allclose(found.turned[:, k], [m[kind].mean() for m in measured], rtol=1e-4)
        np.testing.assert_allclose(found.kl[k], divergence[kind].mean(), rtol=1e-6)
    assert list(found.to_frame()["token"]) == list(KINDS)
    assert "From state to prediction" in str(found)


@pytest.mark.parametrize("same", [True, False])
def test_without_a_tokenizer_no_token_is_a_number(same: bool, ids: torch.Tensor) -> None:
    dense = make_tiny("llama")
    found = explain(dense, copy.deepcopy(dense) if same else make_tiny("llama", seed=1), ids).tokens
    assert found is not None
    assert found.positions[KINDS.index("number")] == 0
    assert np.isnan(found.kl[KINDS.index("number")])
    assert bool(found.answer()) != same
