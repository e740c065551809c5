"""Retrieval against embeddings, rankings and nDCG@10 in float64, one text at a time."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hooks_of, make_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from experiments import retrieval
from experiments.retrieval import RetrievalScores, RetrievalTask, _margin, evaluate_retrieval
from lyapunov_prune import compress, remove_layers
from lyapunov_prune.predictions.verdict import wilson

WORDS = ["ice", "stone", "ether", "thick", "sea", "thing", "rain", "north", "salt", "wheat", "glass", "owl", "fog"]
# Of thirteen documents one has the first query's own id.
TASK = RetrievalTask(
    "made",
    {"q1": "what is cold", "q2": "what grows"},
    {"q1" if i == 3 else f"d{i}": f"{word} and {word[::-1]}" for i, word in enumerate(WORDS)},
    {"q1": {"d0": 2, "d12": 1, "d5": 0}, "q2": {"d9": 1, "d4": -1}},
    "0" * 64,
)


@torch.no_grad()
def embedding(model: PreTrainedModel, ids: list[int], skipped: int) -> np.ndarray:
    wide: Any = copy.deepcopy(model).double()
    return wide.model(torch.tensor([ids]))[0][0, skipped:].mean(0).numpy()


def ndcg(order: list[str], grades: dict[str, int]) -> float:
    """Gains are the grades, those below 0 none; the best ten in the denominator."""
    gains = [max(0, grades.get(document, 0)) for document in order[:10]]
    best = sorted((max(0, grade) for grade in grades.values()), reverse=True)[:10]
    return sum(g / np.log2(k + 2) for k, g in enumerate(gains)) / sum(g / np.log2(k + 2) for k, g in enumerate(best))


def test_ndcg_is_trec_evals() -> None:
    """The value of ir-measures 0.4.3: a grade below 0 gains nothing, and what was not ranked counts as missed."""
    grades = {"b": 3, "d": 1, "e": -2, "k": 2, "z": 2, "a": 0}
    assert retrieval.ndcg("abcdefghij", grades) == pytest.approx(0.4081600524211131, abs=1e-15)
    assert retrieval.ndcg("bkzda", grades) == 1
    assert retrieval.ndcg("ae", grades) == 0


@pytest.mark.parametrize("bos", [False, True])
def test_rankings_and_scores_are_the_definitions(bos: bool, reader: PreTrainedModel) -> None:
    task, tokenizer = TASK, make_tokenizer(adds_bos=bos)
    models = {
        "dense": reader,
        "rounded": compress(reader, method="rtn", bits=3).model,
        "cut": remove_layers(reader, [2]),
    }
    found = evaluate_retrieval(models, tokenizer, task, context=512, batch_size=4)
    ids, names = list(task.documents), list(task.queries)
    similar, tops = [], []
    for m, model in enumerate(models.values()):
        made = {
            name: embedding(model, tokenizer(text)["input_ids"], int(bos))
            for name, text in [*((("q", n), t) for n, t in task.queries.items()), *task.documents.items()]
        }
        S = np.array(
            [
                [made["q", q] @ made[d] / np.linalg.norm(made["q", q]) / np.linalg.norm(made[d]) for d in ids]
                for q in names
            ]
        )
        similar.append(S)
        tops.append([])
        for i, q in enumerate(names):
            order = [ids[k] for k in np.argsort(-S[i]) if ids[k] != q]  # its own text is not ranked
            tops[m].append(set(order[:10]))
            assert found.ndcg[m, i] == pytest.approx(ndcg(order, task.relevant[q]), abs=1e-9)
            assert found.overlap[m, i] == pytest.approx(len(tops[m][i] & tops[0][i]) / 10)
            own = np.array([d != q for d in ids])
            assert found.shift[m, i] == pytest.approx(np.ptp((S - similar[0])[i, own]), abs=1e-6)
            ranked = -np.sort(-similar[0][i, own])
            assert found.margin[i] == pytest.approx(ranked[9] - ranked[10], abs=1e-6)
    assert found.overlap[0].tolist() == [1.0, 1.0]
    assert found.kept[0].all()
    assert (found.overlap[found.kept] == 1).all()
    assert (found.turned[0] == 0).all()
    assert (found.turned[1:] > 0).all()
    assert hooks_of(reader) == 0


def test_a_small_change_keeps_the_ten_and_says_so(reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    near: Any = copy.deepcopy(reader)
    with torch.no_grad():
        near.model.layers[5].mlp.down_proj.weight.mul_(1 + 1e-5)
    found = evaluate_retrieval({"a": reader, "b": near}, tokenizer, TASK, context=512)
    assert (found.shift[1] > 0).all()
    assert found.kept.all()
    assert (found.overlap == 1).all()
    assert (found.ndcg[0] == found.ndcg[1]).all()


def test_the_verdict_is_of_the_second_model() -> None:
    """By hand, of three queries."""
    found = RetrievalScores(
        ndcg=np.array([[1.0, 0.5, 0.0], [0.2, 0.7, 0.3]]),
        overlap=np.array([[1.0, 1.0, 1.0], [0.1, 0.2, 0.9]]),
        margin=np.array([1.5, 2.0, 3.0]),
        shift=np.array([[0.0, 0.0, 0.0], [1.0, 3.0, 3.0]]),
        turned=np.array([[0.0, 0.0], [0.25, 0.75]]),
    )
    assert found.kept.tolist() == [[True] * 3, [True, False, False]]  # as much as the margin is too much
    told = found.verdict()
    assert (told.task, told.moved, told.may_move, told.distance, told.items) == ("retrieval", 3.0, 2.0, 0.75, 3)
    assert (told.same, told.certain) == pytest.approx((0.4, 1 / 3))
    assert (told.low, told.high) == wilson(told.same, 3)
    assert (told.dense, told.compressed) == pytest.approx((0.5, 0.4))


def test_ten_documents_have_no_eleventh() -> None:
    assert np.isnan(_margin(np.zeros((2, 10)))).all()
    assert np.isnan(_margin(np.array([[*np.arange(10.0), -np.inf]]))).all()
    assert _margin(np.arange(11.0)[None]).tolist() == [1.0]
