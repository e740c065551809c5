"""Retrieval: the documents nearest to a query by mean final hidden state, for several models, and the verdict on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.data.batch import checked_batch, filled, require_context
from lyapunov_prune.data.text import adds_bos
from lyapunov_prune.data.unseen import require_unseen_items
from lyapunov_prune.forward.hooks import final_state, require_finite
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.positions import alike
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.predictions.verdict import KindVerdict, wilson

# Depth of the ranking.
TOP = 10


@dataclass(frozen=True)
class RetrievalTask:
    """Texts by id; `relevant` holds each query's judged documents with their grades, above 0 for an answer."""

    name: str
    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, dict[str, int]]
    sha256: str


@dataclass(frozen=True)
class RetrievalScores:
    """Document ranking by `S(q, d) = cos(e_q, e_d)` for every model; the first model is the reference.

    `e` is the mean of the final hidden states (after the final norm) over the tokens of a text. Float64, per query:

    - `ndcg` (models × queries): nDCG@10 (`ndcg`);
    - `overlap` (models × queries): share of the reference's ten nearest documents among the model's own ten;
    - `margin` (queries,): similarity of the tenth document minus that of the eleventh for the reference; NaN with ten
      documents or fewer. `shift` (models × queries): `max_d ΔS − min_d ΔS` against the reference. While `shift <
      margin` the ten nearest documents stay the same (`kept`);
    - `turned` (models × 2): `1 − cos` between a text's two embeddings, means over queries and over documents; NaN for a
      model of another width.

    Source: Demystifying When Pruning Works via Representation Hierarchies, eq. 4 and Table 1a.
    """

    ndcg: np.ndarray
    overlap: np.ndarray
    margin: np.ndarray
    shift: np.ndarray
    turned: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """(models × queries) bool: the similarities changed too little to change the ten nearest documents."""
        return self.shift < self.margin

    def verdict(self) -> KindVerdict:
        """On the second model: a decision is one of the ten nearest documents, and moves with `shift`."""
        n, same = self.ndcg.shape[1], float(self.overlap[1].mean())
        low, high = wilson(same, n)
        return KindVerdict(
            task="retrieval",
            space="final states",
            items=n,
            distance=float(self.turned[1, 1]),
            distance_of="1 − cos of a document's embeddings",
            moved=float(np.median(self.shift[1])),
            may_move=float(np.median(self.margin)),
            unit="of similarity",
            certain=float(self.kept[1].mean()),
            same=same,
            low=low,
            high=high,
            score=f"nDCG@{TOP}",
            dense=float(self.ndcg[0].mean()),
            compressed=float(self.ndcg[1].mean()),
        )


@torch.no_grad()
def evaluate_retrieval(
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    task: RetrievalTask,
    *,
    context: int,
    batch_size: int = 1,
) -> RetrievalScores:
    """Embed all texts with every model and score the rankings, see RetrievalScores.

    A text is truncated to `context` tokens, after a BOS token if the tokenizer adds one. The BOS state is left out of
    the mean, because it is the same for every text. A document with the query's own id is not ranked, as in BEIR.

    Raises NonFiniteError naming the layer when a model is not finite, and LyapunovPruneError for texts that a recorded
    step of a model has seen, and a context longer than that of a model.
    """
    texts = [*task.queries.values(), *task.documents.values()]
    start = [tokenizer.bos_token_id] * adds_bos(tokenizer)
    rows = [(start + tokenizer(text, add_special_tokens=False)["input_ids"])[:context] for text in texts]
    names, ids = list(task.queries), list(task.documents)
    same = np.array([[query == document for document in ids] for query in names])
    scores, embedded, found, nearest = [], [], [], []
    for model in models.values():
        require_unseen_items(model, tokenizer, [(text,) for text in texts], task.name, "queries and documents")
        e = _embed(model, rows, len(start), batch_size)
        unit = e / np.linalg.norm(e, axis=-1, keepdims=True)
        S = unit[: len(names)] @ unit[len(names) :].T
        S[same] = -np.inf
        order = np.argsort(-S, axis=-1, kind="stable")[:, :TOP]
        ranked = {query: [ids[d] for d in best if ids[d] != query] for query, best in zip(names, order, strict=True)}
        found.append([ndcg(ranked[query], task.relevant[query]) for query in names])
        scores.append(S)
        embedded.append(unit)
        nearest.append(order)
    return RetrievalScores(
        ndcg=np.array(found),
        overlap=np.array([[np.isin(a, b).mean() for a, b in zip(nearest[0], own, strict=True)] for own in nearest]),
        margin=_margin(scores[0]),
        shift=np.array([_ranges(scores[0], S, ~same) for S in scores]),
        turned=np.array([_turned(embedded[0], e, len(names)) for e in embedded]),
    )


def ndcg(ranked: Sequence[str], grades: Mapping[str, int]) -> float:
    """nDCG@10 of the documents `ranked`, nearest first: `Σ_k gain_k / log₂(k + 1)` over that of the best ranking.

    Gains are the grades, as in trec_eval's `ndcg_cut_10`: a document without a grade, or with one below 0, gains
    nothing. One grade has to be above 0.
    """

    def discounted(gains: Sequence[int]) -> float:
        return sum(max(gain, 0) / math.log2(k + 2) for k, gain in enumerate(gains[:TOP]))

    return discounted([grades.get(name, 0) for name in ranked]) / discounted(sorted(grades.values(), reverse=True))


@in_eval_mode
def _embed(model: PreTrainedModel, rows: list[list[int]], skipped: int, batch_size: int) -> np.ndarray:
    """The mean final state of every text without its first `skipped` tokens, (texts × width) float64."""
    structure = wrap(model).structure
    require_context(structure, max(map(len, rows)))
    found: dict[int, torch.Tensor] = {}
    groups = alike(structure.config, list(map(len, rows)))
    for some in (group[k : k + batch_size] for group in groups for k in range(0, len(group), batch_size)):
        ids = filled([rows[i] for i in some], least=2)
        state = final_state(structure, checked_batch(structure, ids).ids.to(model.device))
        require_finite(structure, ids, "a text", state)
        found |= {i: lift(row[skipped : len(rows[i])]).mean(0).cpu() for i, row in zip(some, state, strict=True)}
    return torch.stack([found[i] for i in range(len(rows))]).numpy()


def _ranges(first: np.ndarray, own: np.ndarray, ranked: np.ndarray) -> list[float]:
    """(queries,) range of `own − first` over the ranked documents."""
    return [float(np.ptp(b[seen] - a[seen])) for a, b, seen in zip(first, own, ranked, strict=True)]


def _margin(S: np.ndarray) -> np.ndarray:
    """(queries,) similarity of the tenth document minus that of the eleventh."""
    ranked = -np.sort(-S, axis=-1)
    if ranked.shape[1] <= TOP:
        return np.full(len(S), np.nan)
    with np.errstate(invalid="ignore"):
        margin = ranked[:, TOP - 1] - ranked[:, TOP]
    return np.where(np.isfinite(margin), margin, np.nan)  # one of eleven may be the query's own document


def _turned(first: np.ndarray, own: np.ndarray, queries: int) -> tuple[float, float]:
    """Means of `1 − cos` over the texts, as half the squared distance of unit vectors to avoid cancellation."""
    if first.shape != own.shape:
        return float("nan"), float("nan")
    turned = np.square(first - own).sum(-1) / 2
    return float(turned[:queries].mean()), float(turned[queries:].mean())
