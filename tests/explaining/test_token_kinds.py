"""How far state, logits and probabilities turn, by kind of token, against plain sums in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_tiny
from transformers import PreTrainedTokenizerFast

from lyapunov_prune.explaining import token_kinds
from lyapunov_prune.explaining.explain import explain
from lyapunov_prune.explaining.token_kinds import KINDS
from lyapunov_prune.models.decoder import wrap


def one_minus_cos(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    return (1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).numpy()


def test_each_kind_has_the_mean_of_its_positions(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_kinds, "LATE", 12)
    dense = make_tiny("mistral", vocab_size=len(VOCABULARY)).double()
    other = copy.deepcopy(dense)
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight.mul_(1.2)
    text = "in 1984 (the 7 cats)</s> ran 23 miles; the [cats] ran and ran</s>"
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)[: 2 * 28].view(2, -1)
    found = explain(wrap(dense, tokenizer), other, ids).tokens
    assert found is not None
    with torch.no_grad():
        states = [model.model(ids).last_hidden_state[:, :-1].flatten(0, 1) for model in (dense, other)]
        logits = [model(ids).logits[:, :-1].flatten(0, 1) for model in (dense, other)]
    log_p, log_q = (z.log_softmax(-1) for z in logits)
    measured = [one_minus_cos(*states), one_minus_cos(*logits), one_minus_cos(log_p.exp(), log_q.exp())]
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).numpy()
    wanted, every = ids[:, 1:].flatten().tolist(), ids.flatten().tolist()
    place = np.arange(len(wanted)) % (ids.shape[1] - 1)
    texts = [tokenizer.decode([i]) for i in wanted]
    kinds = {
        "all": place >= 0,
        "first": place < 4,
        "end": np.array([text == "</s>" for text in texts]),
        "bracket": np.array([text in (")", "]") for text in texts]),
        "late": place + 1 >= 12,
        "beyond": place + 1 > 8,  # the window of SMALL's mistral
        "rare": np.array([every.count(i) == 1 for i in wanted]),
        "number": np.array([text in "0123456789" for text in texts]),
    }
    kinds["other"] = ~(kinds["first"] | kinds["end"] | kinds["bracket"] | kinds["rare"] | kinds["number"])
    assert all(kind.any() for kind in kinds.values())
    assert list(found.to_frame()["token"]) == list(kinds) == list(KINDS)
    np.testing.assert_array_equal(found.positions, [kind.sum() for kind in kinds.values()])
    for k, kind in enumerate(kinds.values()):
        np.testing.assert_allclose(found.turned[:, k], [m[kind].mean() for m in measured], rtol=1e-4)
        np.testing.assert_allclose(found.kl[k], divergence[kind].mean(), rtol=1e-6)
    assert "From state to prediction" in str(found)


def test_an_eos_that_is_broken_in_the_head_is_told_although_the_mean_is_fine(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The dense model ends a turn for sure, a full stop before; in the other one the row of EOS is zero."""
    dense = make_tiny("llama", vocab_size=len(VOCABULARY))
    turn = tokenizer("the cats ran.</s>", add_special_tokens=False).input_ids
    with torch.no_grad():
        for layer in dense.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        state = dense.model(torch.tensor([turn])).last_hidden_state[0]
        stop = state[-2] / state[-2].norm()
        dense.lm_head.weight.mul_(0.1)
        dense.lm_head.weight[2] = 2 * (stop - state[:-2].mean(0) / state[:-2].mean(0).norm())
        honest, broken = copy.deepcopy(dense), copy.deepcopy(dense)
        honest.lm_head.weight.add_(0.01 * torch.randn(honest.lm_head.weight.shape))
        broken.lm_head.weight[2] = 0
    ids = torch.tensor(turn * 4).repeat(8, 1)
    found, fine = (explain(wrap(dense, tokenizer), other, ids) for other in (broken, honest))
    assert found.tokens is not None
    end = KINDS.index("end")
    assert found.tokens.kl[end] > 5 * found.kl
    assert "where a turn ends" in found.answer()[1]  # behind the fault
    low, high = found.tokens.interval[end]
    assert low <= found.tokens.kl[end] <= high
    assert "elsewhere" not in fine.answer()[0]


@pytest.mark.parametrize("same", [True, False])
def test_without_a_tokenizer_no_token_is_a_number(same: bool, ids: torch.Tensor) -> None:
    dense = make_tiny("llama")
    found = explain(dense, copy.deepcopy(dense) if same else make_tiny("llama", seed=1), ids).tokens
    assert found is not None
    assert found.positions[KINDS.index("number")] == 0
    assert np.isnan(found.kl[KINDS.index("number")])
    assert bool(found.answer()) != same
