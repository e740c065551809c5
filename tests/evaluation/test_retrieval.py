"""Retrieval against embeddings, rankings and nDCG@10 in float64, one text at a time."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hooks_of, make_tokenizer
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import LyapunovPruneError, compress, remove_layers
from lyapunov_prune.data import load_retrieval
from lyapunov_prune.data.retrieval import RetrievalTask
from lyapunov_prune.evaluation import RetrievalScores, evaluate_retrieval, retrieval
from lyapunov_prune.evaluation.retrieval import _margin
from lyapunov_prune.report.evaluation import retrieval_figure

WORDS = [
    "ice",
    "stone",
    "ether",
    "thick",
    "the sea",
    "a thing",
    "rain",
    "north",
    "salt",
    "wheat",
    "glass",
    "owl",
    "fog",
]


def write(folder: Path, **changes: str | None) -> Path:
    """Three queries of which the last has no answer, thirteen documents, one of the first query's own id."""
    folder.mkdir(exist_ok=True)
    documents = [{"_id": f"d{i}", "title": word, "text": f"{word} and {word[::-1]}"} for i, word in enumerate(WORDS)]
    documents[3] = {"_id": "q1", "text": "what is cold"}
    queries = [{"_id": "q1", "text": "what is cold"}, {"_id": "q2", "text": "what grows"}, {"_id": "q3", "text": "why"}]
    grades = [("q1", "d0", 2), ("q1", "d12", 1), ("q1", "d5", 0), ("q2", "d9", 1), ("q2", "d4", -1), ("q3", "d1", 0)]
    files: dict[str, str | None] = {
        "queries": "".join(json.dumps(q) + "\n" for q in queries),
        "corpus": "".join(json.dumps(d) + "\n" for d in documents),
        "qrels": "query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{grade}\n" for q, d, grade in grades),
        **changes,
    }
    (folder / "qrels").mkdir(exist_ok=True)
    for name, path in (("queries", "queries.jsonl"), ("corpus", "corpus.jsonl"), ("qrels", "qrels/test.tsv")):
        if files[name] is not None:
            (folder / path).write_text(str(files[name]), encoding="utf-8")
    return folder


def read(folder: Path) -> RetrievalTask:
    return load_retrieval(folder / "queries.jsonl", folder / "corpus.jsonl")


def test_the_files_of_beir_are_read(tmp_path: Path) -> None:
    task = read(write(tmp_path / "made"))
    assert task.name == "made"
    assert list(task.queries) == ["q1", "q2"]  # the third has no answer
    assert task.documents["d0"] == "ice ice and eci"  # the title stands before the text
    assert task.documents["q1"] == "what is cold"
    assert task.relevant == {"q1": {"d0": 2, "d12": 1, "d5": 0}, "q2": {"d9": 1, "d4": -1}}
    named = load_retrieval(
        tmp_path / "made" / "queries.jsonl",
        tmp_path / "made" / "corpus.jsonl",
        tmp_path / "made" / "qrels" / "test.tsv",
    )
    assert named == task


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"queries": "no json\n"}, r"queries\.jsonl line 1"),
        ({"corpus": '{"_id": "d0", "text": ""}\n'}, r"corpus\.jsonl line 1"),
        (
            {"corpus": '{"_id": "d0", "text": "a"}\n{"_id": "d0", "text": "b"}\n'},
            "line 2 .*d0",
        ),
        ({"qrels": "a\tb\tc\nq1\td0\n"}, r"test\.tsv line 2"),
        ({"qrels": "a\tb\tc\nq1\td0\thigh\n"}, r"test\.tsv line 2"),
        ({"qrels": "a\tb\tc\nq1\td99\t1\n"}, r"test\.tsv line 2 .*d99"),
        ({"qrels": "a\tb\tc\nq9\td0\t1\n"}, r"test\.tsv line 2 .*q9"),
        ({"qrels": "a\tb\tc\nq1\td0\t0\n"}, "no query an answer"),
        ({"qrels": None}, r"cannot read .*test\.tsv"),
    ],
)
def test_what_is_no_task_is_one_line(changes: dict[str, str | None], told: str, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=told) as caught:
        read(write(tmp_path, **changes))
    assert "\n" not in str(caught.value)


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
def test_rankings_and_scores_are_the_definitions(bos: bool, reader: PreTrainedModel, tmp_path: Path) -> None:
    task, tokenizer = read(write(tmp_path)), make_tokenizer(adds_bos=bos)
    models = {
        "dense": reader,
        "rounded": compress(reader, method="rtn", bits=3).model,
        "cut": remove_layers(reader, [2]),
    }
    found = evaluate_retrieval(models, tokenizer, task, batch_size=4)
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
    assert found.measured_on[1].bos is bos
    assert hooks_of(reader) == 0
    again = RetrievalScores.load(found.save(tmp_path / "r.json"))
    assert str(again) == str(found)
    assert retrieval_figure(again) == retrieval_figure(found)


def test_a_small_change_keeps_the_ten_and_says_so(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    near: Any = copy.deepcopy(reader)
    with torch.no_grad():
        near.model.layers[5].mlp.down_proj.weight.mul_(1 + 1e-5)
    found = evaluate_retrieval({"a": reader, "b": near}, tokenizer, read(write(tmp_path)))
    assert (found.shift[1] > 0).all()
    assert found.kept.all()
    assert (found.overlap == 1).all()
    assert (found.ndcg[0] == found.ndcg[1]).all()


def test_the_summary_is_of_means_and_standard_errors_over_queries(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    ndcg = np.array([[1.0, 0.5, 0.0], [0.2, 0.7, 0.3]])
    shift = np.array([[0.0, 0.0, 0.0], [1.0, 2.0, 6.0]])
    found = dataclasses.replace(
        evaluate_retrieval({"a": reader, "b": reader}, tokenizer, read(write(tmp_path))),
        ndcg=ndcg,
        overlap=np.array([[1.0, 1.0, 1.0], [0.1, 0.2, 0.9]]),
        margin=np.array([1.5, 2.0, 2.5]),
        shift=shift,
        turned=np.array([[0.0, 0.0], [0.25, 0.75]]),
    )
    assert found.kept.tolist() == [[True] * 3, [True, False, False]]  # as much as the margin is too much
    frame = found.summary()
    np.testing.assert_allclose(frame["nDCG@10"], [0.5, 0.4])
    np.testing.assert_allclose(frame["error"], stats.sem(ndcg, axis=1))
    np.testing.assert_allclose(frame["− first"], [0.0, -0.1], atol=1e-12)
    np.testing.assert_allclose(frame["difference"], stats.sem(ndcg - ndcg[0], axis=1))
    np.testing.assert_allclose(frame["overlap"], [1.0, 0.4])
    assert frame["shift"].tolist() == [0.0, 2.0]
    np.testing.assert_allclose(frame["kept"], [1.0, 1 / 3])
    assert frame["turned_queries"].tolist() == [0.0, 0.25]
    assert frame["turned_documents"].tolist() == [0.0, 0.75]
    alone = dataclasses.replace(found, ndcg=ndcg[:, :1], overlap=shift[:, :1], shift=shift[:, :1]).summary()
    assert alone[["error", "difference"]].isna().all(axis=None)


def test_ten_documents_have_no_eleventh() -> None:
    assert np.isnan(_margin(np.zeros((2, 10)))).all()
    assert np.isnan(_margin(np.array([[*np.arange(10.0), -np.inf]]))).all()
    assert _margin(np.arange(11.0)[None]).tolist() == [1.0]


def test_long_texts_are_cut_and_counted(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    task = read(write(tmp_path))
    found = evaluate_retrieval({"m": reader}, tokenizer, task, context=12)
    long = [t for t in (*task.queries.values(), *task.documents.values()) if len(tokenizer(t)["input_ids"]) > 12]
    assert found.cut == len(long) > 0
    assert f"{len(long)} texts cut to 12 tokens" in found.headline()
    with pytest.raises(LyapunovPruneError, match="context is 1"):
        evaluate_retrieval({"m": reader}, tokenizer, task, context=1)
