"""A result is read back only where it was asked exactly the same."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.overlap import Fingerprint
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result
from lyapunov_prune.results.store import once

MODEL = ModelIdentity("m", "llama", 2, 10, "abc", {"float32": "def"})
ORIGIN = MeasuredOn(MODEL, "float32", "cpu", "a book", "calibration", "123", 8, 4, False, None, {"torch": "2"})
SETTINGS = {"epsilon": 1e-2, "seeds": (0, 1), "method": "difference", "limit": math.inf, "removed": {"rho": [(1, 2)]}}


@dataclass(frozen=True)
class Count(Result):
    values: np.ndarray

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"value": self.values})


class Asked:
    """Asks for the file, and counts how often something was measured."""

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, 0

    def __call__(self, origin: MeasuredOn = ORIGIN, shared: bool = False, **parameters: Any) -> int:
        def measure() -> Count:
            self.times += 1
            return Count(np.array([self.times]))

        return int(once(self.path, Count, origin, SETTINGS | parameters, measure, shared=shared).values[0])


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path / "new" / "count.json")


def test_the_same_question_is_measured_once(asked: Asked) -> None:
    assert [asked(), asked(), asked(seeds=[0, 1]), asked(epsilon=np.float64(1e-2))] == [1, 1, 1, 1]
    assert Count.load(asked.path).values.tolist() == [1]


@pytest.mark.parametrize(
    "other",
    [
        {"epsilon": 1.00000001e-2},
        {"seeds": (0, 1, 2)},
        {"seeds": (1, 0)},
        {"method": "jvp"},
        {"limit": 10.0},
        {"removed": {"rho": [(1, 3)]}},
        {"steps": 12},
        {"origin": replace(ORIGIN, text_hash="124")},
        {"origin": replace(ORIGIN, dtype="bfloat16")},
        {"origin": replace(ORIGIN, context=8)},
        {"origin": replace(ORIGIN, seed=1)},
        {"origin": replace(ORIGIN, versions={"torch": "3"})},
        {"origin": replace(ORIGIN, model=replace(MODEL, weights={"float32": "xyz"}))},
    ],
    ids=str,
)
def test_any_other_question_is_measured_anew(other: dict[str, Any], asked: Asked) -> None:
    assert [asked(), asked(**other), asked(**other), asked()] == [1, 2, 2, 3]


def test_the_fingerprint_is_of_the_tokens_that_the_hash_names(asked: Asked) -> None:
    assert asked() == asked(replace(ORIGIN, fingerprint=Fingerprint(4, 8, "AAAAAAAAAAA="))) == 1


def test_a_file_that_others_write_too_is_not_replaced_by_another_question(asked: Asked) -> None:
    assert asked(shared=True) == 1
    before = asked.path.read_bytes()
    with pytest.raises(LyapunovPruneError, match="other settings"):
        asked(shared=True, epsilon=0.1)
    assert (asked.path.read_bytes(), asked.times) == (before, 1)
    assert asked(shared=True) == 1


def test_a_file_that_does_not_say_what_it_was_asked_is_measured_anew(asked: Asked) -> None:
    whole = asked.path
    for content in ("", "[1]", "3", json.dumps({"kind": "Count", "values": [9]})):
        asked()
        whole.write_text(content)
        before = asked.times
        assert asked() == before + 1
