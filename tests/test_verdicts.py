"""The experiment on verdicts: what is laid down to be right is counted, and a model decides as the tool says."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
from helpers import make_tiny, make_tokenizer

from experiments.hierarchies import taken
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.data.choices import ChoiceItem
from lyapunov_prune.predictions.choices import compare_choices
from lyapunov_prune.predictions.verdict import KindVerdict, wilson

VERDICTS = importlib.import_module("experiments.4_hierarchy.verdicts.run")
NAN = float("nan")


def said(same: float, items: int = 36, task: str = "choice") -> KindVerdict:
    low, high = wilson(same, items)
    return KindVerdict(
        task=task,
        space="",
        items=items,
        distance=NAN,
        distance_of="",
        moved=NAN,
        may_move=NAN,
        unit="",
        certain=NAN,
        same=same,
        low=low,
        high=high,
        score="",
        dense=NAN,
        compressed=NAN,
        returns=NAN,
    )


def cell(word_of: float, right: int, items: int = 36, task: str = "choice") -> object:
    values = (np.arange(items) < right).astype(float)
    return VERDICTS.Cell("m", "c", said(word_of, task=task), "same source", values)


@pytest.mark.parametrize(
    ("said_share", "word", "right", "outcome"),
    [
        (1.0, "stays", 36, "right"),
        (1.0, "stays", 33, "right"),  # 0.917
        (1.0, "stays", 32, "missed"),  # 0.889, up to 0.956
        (1.0, "stays", 20, "refuted"),
        (0.7, "changes", 25, "right"),
        (0.7, "changes", 18, "right"),  # 0.5 belongs to it
        (0.7, "changes", 17, "missed"),
        (0.7, "changes", 33, "missed"),  # 0.917, from 0.782
        (0.7, "changes", 2, "refuted"),
        (0.1, "lost", 17, "right"),
        (0.1, "lost", 18, "missed"),
        (0.1, "lost", 36, "refuted"),
    ],
)
def test_right_missed_and_refuted(said_share: float, word: str, right: int, outcome: str) -> None:
    found = cell(said_share, right)
    assert (found.said.word, found.outcome) == (word, outcome)  # type: ignore[attr-defined]


def test_a_share_holds_by_newcombes_interval() -> None:
    """Newcombe, Statistics in Medicine 17, 1998, method 10: 56/70 less 48/80 has the interval 0.0524 to 0.3339."""
    values = (np.arange(80) < 48).astype(float)
    one = VERDICTS.Cell("m", "c", said(56 / 70, 70), "same source", values)
    assert not one.holds
    assert VERDICTS.Cell("m", "c", said(48 / 80, 80), "same source", values).holds
    difference, (low, high) = 56 / 70 - 48 / 80, wilson(48 / 80, 80)
    assert difference - np.hypot(56 / 70 - one.said.low, high - 48 / 80) == pytest.approx(0.0524, abs=1e-4)
    assert difference + np.hypot(one.said.high - 56 / 70, 48 / 80 - low) == pytest.approx(0.3339, abs=1e-4)


def test_the_rule_to_beat_is_the_best_word_of_each_kind() -> None:
    cells = [
        cell(0.7, right, task=kind) for kind, right in zip(VERDICTS.KINDS * 2, (36, 20, 1, 36, 36, 0), strict=True)
    ]
    assert VERDICTS.rule(cells) == {"retrieval": "stays", "choice": "stays", "generation": "lost"}
    assert VERDICTS.by_rule(cells) == 5
    assert VERDICTS.right_of(cells).startswith("1 of 6, ")


def test_a_word_is_counted_where_it_is_said() -> None:
    bad = [cell(0.7, right, task=kind) for kind, right in zip(VERDICTS.KINDS * 3, (36, 36, 0) * 3, strict=True)]
    pairs = [replace(c, which=which) for c in bad for which in VERDICTS.SETS]  # type: ignore[type-var]
    assert "`stays`" not in VERDICTS.by_word(pairs)
    numbers = VERDICTS.numbers(pairs)
    assert numbers["refuted"] == "18"  # 36 of 36 are 0.904 to 1, 0 of 36 up to 0.096: all lie outside
    assert numbers["by-rule"] == "18"


def test_passages_are_a_sentence_and_the_rest() -> None:
    sentence, rest = "A sentence that has more than forty characters .", "word " * 50
    assert VERDICTS.passages([" = Title = ", "short . no", f" {sentence} {rest}"]) == [(sentence, rest.strip())]
    task = VERDICTS.sought([(f"q {i}", f"d {i}") for i in range(9)], 3)
    assert list(task.queries) == ["q0", "q1", "q2"]
    assert len(task.documents) == 4
    assert task.relevant["q1"] == {"d1": 1}


def test_what_is_kept_of_a_text_ends_where_it_parts() -> None:
    dense, own = np.array([[1, 2, 3, 4], [1, 2, 3, 4]]), np.array([[1, 2, 9, 4], [1, 2, 3, 4]])
    assert VERDICTS.share_kept(dense, own).tolist() == [0.5, 1.0]


def test_what_is_taken_is_what_the_comparison_chooses() -> None:
    model, tokenizer = make_tiny("llama", vocab_size=260), make_tokenizer()
    small = compress(model, method="rtn", bits=3).model
    items = tuple(ChoiceItem(f"what is {i}?", ("one thing", "two", "a third"), i % 3) for i in range(12))
    found = compare_choices(model, small, items, tokenizer)
    for which, one in (("dense", model), ("compressed", small)):
        assert [taken(one, item, tokenizer) for item in items] == found.chosen(which, per_character=True).tolist()
    assert found.survival(per_character=True) < 1
