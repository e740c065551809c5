"""Retrieval: the documents nearest to a query by mean final hidden state, for several models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.arguments import Count, Range, checked
from lyapunov_prune.data.batch import checked_batch, filled, require_context, rows_measured_on
from lyapunov_prune.data.retrieval import RetrievalTask
from lyapunov_prune.data.text import adds_bos
from lyapunov_prune.data.unseen import require_unseen_items
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import final_state, require_finite
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.positions import alike
from lyapunov_prune.models.streamed import require_not_streamed
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, MeasuredOn, Result

# Depth of the ranking.
TOP = 10


@dataclass(frozen=True)
class RetrievalScores(Result):
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

    task: str
    sha256: str
    models: tuple[str, ...]
    documents: int
    cut: int  # texts truncated to `context` tokens
    ndcg: np.ndarray
    overlap: np.ndarray
    margin: np.ndarray
    shift: np.ndarray
    turned: np.ndarray
    measured_on: tuple[MeasuredOn, ...]

    @property
    def kept(self) -> np.ndarray:
        """(models × queries) bool: the similarities changed too little to change the ten nearest documents."""
        return self.shift < self.margin

    def to_frame(self) -> pd.DataFrame:
        """One row per model and query."""
        queries = self.ndcg.shape[1]
        model, query = np.repeat(self.models, queries), np.tile(np.arange(queries), len(self.models))
        measured = {name: getattr(self, name).ravel() for name in ("ndcg", "overlap", "shift", "kept")}
        return pd.DataFrame(
            {"model": model, "query": query, "margin": np.tile(self.margin, len(self.models)), **measured}
        )

    def summary(self) -> pd.DataFrame:
        """One row per model, means over queries.

        `error` is the standard error of nDCG@10, `difference` that of its difference to the reference, paired by query.
        """
        n = self.ndcg.shape[1]
        paired = self.ndcg - self.ndcg[0]
        spread = [stats.sem(x, axis=-1) if n > 1 else np.full(len(x), np.nan) for x in (self.ndcg, paired)]
        return pd.DataFrame(
            {
                "model": self.models,
                "nDCG@10": self.ndcg.mean(-1),
                "error": spread[0],
                "− first": paired.mean(-1),
                "difference": spread[1],
                "overlap": self.overlap.mean(-1),
                "shift": np.median(self.shift, axis=-1),
                "kept": self.kept.mean(-1),
                "turned_queries": self.turned[:, 0],
                "turned_documents": self.turned[:, 1],
            }
        )

    def answer(self) -> list[str]:
        shown = self.summary()
        found = " → ".join(f"{x:.3g}" for x in shown["nDCG@10"])
        cut = f", {self.cut} texts cut to {self.measured_on[0].context} tokens" if self.cut else ""
        lines = [
            f"{self.task} ({self.ndcg.shape[1]} queries, {self.documents} documents{cut}): nDCG@{TOP} {found} of "
            f"{', '.join(self.models)}."
        ]
        lines += [
            f"{row.model}: {row.overlap:.0%} of the ten nearest documents of {self.models[0]} stay among the ten."
            for row in shown.iloc[1:].itertuples()
        ]
        return [*lines, "A base model is no embedding model: compare the models, not the level."][:LINES]

    def headline(self) -> str:
        on = self.measured_on[0]
        cut = f", {self.cut} texts cut to {on.context} tokens" if self.cut else ""
        margin = f"{np.median(self.margin):.2g}" if np.isfinite(self.margin).all() else "none: ten documents or fewer"
        return (
            f"Retrieval, {self.task}: {self.ndcg.shape[1]} queries, {self.documents} documents{cut}; means of final "
            f"hidden_states compared by cosine\n"
            f"median margin between the tenth and the eleventh document: {margin}\n{on.line()}"
        )


@checked
@torch.no_grad()
def evaluate_retrieval(
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    task: RetrievalTask,
    *,
    context: Annotated[int, Range(2)] = 512,
    batch_size: Count = 1,
) -> RetrievalScores:
    """Embed all texts with every model and score the rankings, see RetrievalScores.

    A text is truncated to `context` tokens, after a BOS token if the tokenizer adds one. The BOS state is
    left out of the mean, because it is the same for every text. A document with the query's own id is not ranked, as
    in BEIR. Memory: the float64 embeddings of all documents and the similarities of all queries.

    Raises NonFiniteError naming the layer when a model is not finite, and LyapunovPruneError for texts that a
    recorded step of a model has seen, a text without tokens, a context longer than that of a model, and ids outside a
    vocabulary.
    """
    begins = adds_bos(tokenizer)
    texts = [*task.queries.values(), *task.documents.values()]
    require_unseen_texts(models, tokenizer, task)
    rows, cut = _tokens(texts, tokenizer, begins, context)
    names, ids = list(task.queries), list(task.documents)
    same = np.array([[query == document for document in ids] for query in names])
    scores, embedded, found, nearest, measured = [], [], [], [], []
    for name, model in models.items():
        e = _embed(model, rows, int(begins), batch_size, name)
        unit = e / np.linalg.norm(e, axis=-1, keepdims=True)
        S = unit[: len(names)] @ unit[len(names) :].T
        S[same] = -np.inf
        order = np.argsort(-S, axis=-1, kind="stable")[:, :TOP]
        ranked = {query: [ids[d] for d in best if ids[d] != query] for query, best in zip(names, order, strict=True)}
        found.append([ndcg(ranked[query], task.relevant[query]) for query in names])
        scores.append(S)
        embedded.append(unit)
        nearest.append(order)
        measured.append(rows_measured_on(model, rows, task.name, bos=begins))
    return RetrievalScores(
        task=task.name,
        sha256=task.sha256,
        models=tuple(models),
        documents=len(ids),
        cut=cut,
        ndcg=np.array(found),
        overlap=np.array([[np.isin(a, b).mean() for a, b in zip(nearest[0], own, strict=True)] for own in nearest]),
        margin=_margin(scores[0]),
        shift=np.array([_ranges(scores[0], S, ~same) for S in scores]),
        turned=np.array([_turned(embedded[0], e, len(names)) for e in embedded]),
        measured_on=tuple(measured),
    )


def ndcg(ranked: Sequence[str], grades: Mapping[str, int]) -> float:
    """nDCG@10 of the documents `ranked`, nearest first: `Σ_k gain_k / log₂(k + 1)` over that of the best ranking.

    Gains are the grades, as in trec_eval's `ndcg_cut_10`: a document without a grade, or with one below 0, gains
    nothing. One grade has to be above 0.
    """

    def discounted(gains: Sequence[int]) -> float:
        return sum(max(gain, 0) / math.log2(k + 2) for k, gain in enumerate(gains[:TOP]))

    return discounted([grades.get(name, 0) for name in ranked]) / discounted(sorted(grades.values(), reverse=True))


def require_unseen_texts(
    models: Mapping[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, task: RetrievalTask
) -> None:
    """Raise LyapunovPruneError for queries or documents that a recorded step of one of `models` has seen."""
    items = [(text,) for text in (*task.queries.values(), *task.documents.values())]
    for model in models.values():
        require_unseen_items(model, tokenizer, items, task.name, "queries and documents")


def _tokens(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, begins: bool, context: int
) -> tuple[list[list[int]], int]:
    """The ids of every text, and the number of truncated texts."""
    start = [tokenizer.bos_token_id] * begins
    rows, cut = [], 0
    for text in texts:
        row = start + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(row) == len(start):
            raise LyapunovPruneError(f"the text {text[:40]!r} has no tokens; give another")
        cut += len(row) > context
        rows.append(row[:context])
    return rows, cut


@in_eval_mode
def _embed(model: PreTrainedModel, rows: list[list[int]], skipped: int, batch_size: int, name: str) -> np.ndarray:
    """The mean final state of every text without its first `skipped` tokens, (texts × width) float64."""
    require_not_streamed(model)
    structure = wrap(model).structure
    require_context(structure, max(map(len, rows)))
    found: dict[int, torch.Tensor] = {}
    groups = alike(structure.config, list(map(len, rows)))
    batches = [group[k : k + batch_size] for group in groups for k in range(0, len(group), batch_size)]
    for some in track(batches, f"embeddings of {name}"):
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
