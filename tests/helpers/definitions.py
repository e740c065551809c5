"""The definitions of measures and scores, in numpy."""

from __future__ import annotations

import copy

import numpy as np
import torch
from scipy.special import log_softmax, rel_entr, softmax
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.data import ChoiceItem
from lyapunov_prune.predictions.spaces import HIDDEN, PROBABILITIES


def turned(v: np.ndarray, w: np.ndarray) -> np.ndarray:
    return 1 - (v * w).sum(-1) / np.linalg.norm(v, axis=-1) / np.linalg.norm(w, axis=-1)


def directions_by_definition(v: np.ndarray, delta: np.ndarray) -> dict[str, np.ndarray]:
    size = np.linalg.norm(v, axis=-1, keepdims=True)
    along = (v * delta).sum(-1, keepdims=True) * v / size**2
    across = np.linalg.norm(delta - along, axis=-1) / size[..., 0]
    found = (turned(v, v + delta), across**2 / 2, np.linalg.norm(along, axis=-1) / size[..., 0], across)
    return dict(zip(HIDDEN, found, strict=True))


def predictions_by_definition(z: np.ndarray, dz: np.ndarray, T: float) -> dict[str, np.ndarray]:
    p, q, d = softmax(z / T, axis=-1), softmax((z + dz) / T, axis=-1), dz / T
    r = p**2 / (p**2).sum(-1, keepdims=True)

    def variance(w: np.ndarray) -> np.ndarray:
        return (w * (d - (w * d).sum(-1, keepdims=True)) ** 2).sum(-1)

    c = np.abs(d - (p * d).sum(-1, keepdims=True)).max(-1)
    kl, reverse = rel_entr(p, q).sum(-1), rel_entr(q, p).sum(-1)
    c_r = np.abs(d - (r * d).sum(-1, keepdims=True)).max(-1)
    found = (turned(p, q), variance(r) / 2, variance(p) / 2, kl, reverse, np.ptp(d, axis=-1), c, c_r, d.var(-1))
    return dict(zip(PROBABILITIES, found, strict=True))


def measures_by_definition(z: np.ndarray, z2: np.ndarray, T: float = 1.0) -> np.ndarray:
    """The measures of `SkipDivergence` in its order, one behind the other, of every row."""
    found = predictions_by_definition(z, z2 - z, T) | {"flipped": z.argmax(-1) != z2.argmax(-1)}
    return np.array([found[name] for name in ("kl_estimate", "kl", "reverse_kl", "flipped", "probability_estimate")])


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ITEMS = (
    ChoiceItem("Which melts?", ("ice", "stone", "the thick ether"), 0),
    ChoiceItem("Two and two are\n", ("four", "5", "café", "zzzzzzzzzzzz"), 2),
    ChoiceItem("a", ("bc", "bd"), 1),  # one first token
    ChoiceItem("This and that", ("th", "ht"), 0),
)


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    return copy.deepcopy(model).double()(torch.tensor([tokens])).logits[0].numpy()


def by_definition(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, item: ChoiceItem) -> list[float]:
    """Of every choice on its own. The tokenizer is one of bytes: the query's tokens are the query's."""
    joint = "" if item.query.endswith("\n") else " "
    query, found = len(tokenizer(item.query)["input_ids"]), []
    for choice in item.choices:
        ids = tokenizer(item.query + joint + choice)["input_ids"]
        log_p = log_softmax(logits_of(model, ids), -1)
        found.append(sum(log_p[t - 1, ids[t]] for t in range(query, len(ids))))
    return found
