"""Every result comes back from its file as it was, and no other file is taken for one."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pytest
from helpers import example
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import lyapunov_prune
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.result import ROWS, ModelIdentity, Reported, Result, versions


def result_classes() -> list[type[Result]]:
    for module in pkgutil.walk_packages(lyapunov_prune.__path__, "lyapunov_prune."):
        importlib.import_module(module.name)
    classes, kinds = [Result], set()
    while classes:
        below = classes.pop().__subclasses__()
        classes += below
        kinds |= {c for c in below if dataclasses.is_dataclass(c) and c.__module__.startswith("lyapunov_prune.")}
    return sorted(kinds, key=lambda c: c.__name__)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down; NaN equals itself."""
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def strict(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(params=result_classes(), ids=lambda c: c.__name__)
def result(request: pytest.FixtureRequest) -> Result:
    return example(request.param, itertools.cycle([math.nan, 0.1, math.inf, -math.inf, 1e-300]))


# What a model was made by, not measured by; speeds of random tokens, which name device, dtype and versions themselves;
# what is found of tensors, which a result of a model holds; what a config says; and what a work will cost, before
# anything is measured.
ELSEWHERE = {
    "CompressionReport",
    "Diagnosis",
    "Estimate",
    "History",
    "LayerAlignment",
    "MatrixErrors",
    "Provenance",
    "Speed",
}
ELSEWHERE |= {"Exported", "FileCheck", "Frontier", "TokenCertificate", "TokenKinds"}


def test_every_result_knows_its_text_and_comes_back_from_a_strict_file_of_its_kind(
    result: Result, tmp_path: Path
) -> None:
    assert hasattr(result, "measured_on") != (type(result).__name__ in ELSEWHERE)
    path = result.save(tmp_path / "result.json")
    data = strict(path.read_text(encoding="utf-8"))
    assert data["kind"] == type(result).__name__
    assert data == strict(json.dumps(result.to_json(), allow_nan=False))
    assert same(type(result).load(path), result)


def test_no_field_hides_the_class_in_the_file() -> None:
    with pytest.raises(TypeError, match="field `kind`"):
        type("Hidden", (Result,), {"__annotations__": {"kind": str}})


# The rest is the same code for every class: one example is enough.


@dataclass(frozen=True)
class Example(Result):
    model: ModelIdentity
    values: np.ndarray
    note: str | None
    table: dict[str, tuple[float, ...]]

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"value": self.values})


@dataclass(frozen=True)
class Headed(Example):
    def headline(self) -> str:
        return "above"


@pytest.fixture
def one() -> Example:
    model = ModelIdentity("m", "llama", 2, 10, "abc", {"float32": "def"})
    return Example(model, np.array([1.0, math.nan]), None, {"a": (math.inf,)})


def written(folder: Path, data: Any) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_file_cut_short_and_one_without_a_field_are_refused(one: Example, tmp_path: Path) -> None:
    path = one.save(tmp_path / "result.json")
    path.write_text(path.read_text(encoding="utf-8")[:-3], encoding="utf-8")
    with pytest.raises(LyapunovPruneError, match="this version"):
        Example.load(path)
    for name in ("model", "values", "note", "table"):
        data = {key: value for key, value in one.to_json().items() if key != name}
        with pytest.raises(LyapunovPruneError, match=f"version's .*{name}"):
            Example.load(written(tmp_path, data))


def test_a_list_of_numbers_is_one_line_of_a_file_and_text_stays_as_it_is(one: Example, tmp_path: Path) -> None:
    listed = dataclasses.replace(one, note="[\n1,\n 2]", table={"a": (1.0, 2.5)})
    path = listed.save(tmp_path / "result.json")
    assert '"a": [1.0, 2.5]' in path.read_text(encoding="utf-8")
    assert Example.load(path).note == listed.note


def test_numpy_scalars_are_written_as_numbers(one: Example, tmp_path: Path) -> None:
    scalars = dataclasses.replace(one, table={"a": (np.float64(1.5), np.float32("nan"), np.int64(2))})
    assert Example.load(scalars.save(tmp_path / "x")).table["a"][::2] == (1.5, 2.0)


def test_a_present_optional_comes_back(one: Example, tmp_path: Path) -> None:
    noted = dataclasses.replace(one, note="n")
    assert Example.load(noted.save(tmp_path / "x")).note == "n"


def test_an_empty_array_comes_back(one: Example, tmp_path: Path) -> None:
    empty = dataclasses.replace(one, values=np.empty(0))
    assert Example.load(empty.save(tmp_path / "x")).values.shape == (0,)


@given(
    arrays(
        st.sampled_from([np.bool_, np.int64, np.float64, np.uint8, np.uint64, np.int32, np.float32]),
        array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    )
)
def test_an_array_comes_back_in_its_type_and_shape(values: np.ndarray) -> None:
    text = json.dumps(encode(values), allow_nan=False)
    again = decode(np.ndarray, json.loads(text))
    assert (again.dtype, again.shape) == (values.dtype, values.shape)
    assert np.array_equal(again, values, equal_nan=values.dtype.kind == "f")


def test_the_lists_of_older_files_are_float64() -> None:
    assert decode(np.ndarray, []).dtype == decode(np.ndarray, ["nan", 1.0]).dtype == np.float64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"table": {"a": [1.0, "many"]}}, r"\$\.table\['a'\]\[1\]"),
        ({"model": {"unheard": 1}}, r"\$\.model\.name"),
        ({"values": ["x"]}, r"\$\.values"),
    ],
    ids=str,
)
def test_the_field_that_does_not_fit_is_named(change: dict[str, Any], named: str, one: Example, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=named):
        Example.load(written(tmp_path, one.to_json() | change))


def test_what_a_result_refuses_itself_is_said_with_the_file(tmp_path: Path) -> None:
    plan = PruningPlan.given(ModelIdentity("m", "llama", 3, 10, "abc", {}), [1])
    path = written(tmp_path, plan.to_json() | {"gone": {"remove": [9]}})
    with pytest.raises(LyapunovPruneError, match=r"result\.json .*layer 9"):
        PruningPlan.load(path)


def test_another_kind_is_refused(one: Example, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"Headed .*Example"):
        Headed.load(one.save(tmp_path / "x"))


@pytest.mark.parametrize("data", [{"model_type": "llama"}, [1, 2], 3, None, "text"])
def test_a_foreign_file_is_refused(data: Any, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"Example .*no result"):
        Example.load(written(tmp_path, data))


@pytest.mark.parametrize(
    "change",
    [
        {"unheard": 1},
        {"model": {"unheard": 1}},
        {"model": 3},
        {"model": None},
        {"table": [1]},
        {"table": {"a": 3}},
        {"values": ["x"]},
        {"values": [[1.0], [1.0, 2.0]]},
    ],
    ids=str,
)
def test_fields_that_do_not_fit_are_refused(change: dict[str, Any], one: Example, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="version's Example"):
        Example.load(written(tmp_path, one.to_json() | change))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LyapunovPruneError, match="this version"):
        Example.load(tmp_path / "x")


@pytest.mark.parametrize("name", ["absent", "."])
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="cannot read"):
        Example.load(tmp_path / name)


def test_a_result_prints_as_its_table_under_its_answer(one: Example) -> None:
    assert str(one).splitlines()[0].strip() == "value"
    headed = Headed(one.model, one.values, None, {})
    assert str(headed).splitlines()[0] == "above"
    assert repr(headed) == str(headed)


def test_a_number_that_there_is_not_is_a_dash(one: Example) -> None:
    assert str(one).splitlines()[2].strip() == "–"
    assert "<td>–</td>" in one._repr_html_()


def test_what_is_printed_without_being_asked_for_is_short(one: Example) -> None:
    long = Headed(one.model, np.arange(1000.0), None, {})
    assert len(str(long).splitlines()) == ROWS + 3  # the answer, the header, and how many rows there are
    assert f"{ROWS} of 1000 rows" in str(long)
    assert len(one.unshown("")) == 0


def test_a_notebook_shows_the_same_and_names_are_text_there(one: Example) -> None:
    class Named(Headed):
        def headline(self) -> str:
            return "<img src=x>"

    shown = Named(one.model, np.arange(1000.0), None, {})._repr_html_()
    assert "<img" not in shown
    assert "&lt;img" in shown
    assert shown.count("<tr") == ROWS + 1
    assert f"{ROWS} of 1000 rows" in shown


def test_what_holds_a_model_and_a_report_shows_as_the_report(one: Example) -> None:
    pairs = Reported.__subclasses__()
    assert {kind.__name__ for kind in pairs} == {"Compressed", "Healed", "Shrunk"}
    for kind in pairs:
        made = kind(object(), one)  # type: ignore[call-arg]
        assert repr(made) == str(one)
        assert made._repr_html_() == one._repr_html_()


def test_what_is_printed_in_python_says_python_and_the_answer_options(one: Example) -> None:
    class Advising(Headed):
        def headline(self) -> str:
            return "measure again (--dtype float32)"

    advising = Advising(one.model, one.values, None, {})
    assert advising.answer() == ["measure again (--dtype float32)"]
    assert str(advising).splitlines()[0] == "measure again (dtype='float32')"
    assert "(dtype=&#39;float32&#39;)" in advising._repr_html_()


def test_versions_name_what_can_move_a_number() -> None:
    assert {"python", "lyapunov-prune", "torch", "transformers", "numpy", "scipy"} <= versions().keys()
