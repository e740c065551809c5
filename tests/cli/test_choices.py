"""Names that help lists are those of the tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import pytest

from lyapunov_prune.cli import choices
from lyapunov_prune.cli.inputs import require_studies
from lyapunov_prune.models.loading import _DTYPES
from lyapunov_prune.sensitivity import table as studies

TABLES: dict[str, tuple[Any, Iterable[str]]] = {
    "dtype": (choices.DType, _DTYPES),
}


@pytest.mark.parametrize("name", TABLES)
def test_help_lists_the_names_of_the_table(name: str) -> None:
    listed, table = TABLES[name]
    assert sorted(get_args(listed)) == sorted(table)


def test_all_studies_are_those_that_are_not_too_dear() -> None:
    assert require_studies("all") == tuple(name for name, known in studies.STUDIES.items() if known.in_all)
    assert "greedy-rescored" not in require_studies("all")
    assert require_studies("greedy-rescored, layer") == ("greedy-rescored", "layer")
