"""The columns of the formats say what can be done with each."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from lyapunov_prune.cli import choices
from lyapunov_prune.compression.method import Method
from lyapunov_prune.compression.recipe import CompressionRequest
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.format import Format
from lyapunov_prune.export.table import FORMATS, formats_of, require_streamed_format


def test_the_choices_are_the_formats_that_a_command_writes() -> None:
    assert get_args(choices.Written) == tuple(formats_of("export"))
    assert get_args(choices.Stored) == tuple(formats_of("compress"))
    written = {name: {c for c in ("prune", "export", "compress") if name in formats_of(c)} for name in FORMATS}
    assert (written["plain"], written["compact"]) == ({"prune", "export", "compress"}, {"prune"})
    assert written["packed"] == {"compress"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_filled(name: str) -> None:
    known = FORMATS[name]
    assert known.name == name
    assert known.readers
    assert set(known.units) <= {method.unit for method in METHODS.values()}
    assert set(known.streamed) <= {command for command in ("prune", "compress") if name in formats_of(command)}
    if known.card is not None:
        assert known.card.name == name
        assert set(known.card.parts) <= {"attention", "activation"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("method", METHODS)
def test_a_format_takes_the_methods_of_its_units(name: str, method: str) -> None:
    known: type[Method] = METHODS[method]
    asked = CompressionRequest(method, bits=4 if known.unit == "bits" else None, symmetric=True)
    if known.unit in FORMATS[name].units and (name, method) != ("packed", "awq"):
        FORMATS.make(name).require_method(asked)
    else:
        with pytest.raises(LyapunovPruneError, match=method):
            FORMATS.make(name).require_method(asked)


def test_a_format_without_words_of_its_own_refuses_by_its_units() -> None:
    class Ranks(Format):
        __module__ = "ranks"
        units = ("rank",)

    Ranks().require_method(CompressionRequest("svd"))
    with pytest.raises(LyapunovPruneError, match=r"ranks .*wanda.* svd, whitened-svd, balanced$"):
        Ranks().require_method(CompressionRequest("wanda"))


def test_a_format_is_streamed_by_the_commands_that_it_names() -> None:
    require_streamed_format("packed", "compress")
    with pytest.raises(LyapunovPruneError, match=r"packed .*plain"):
        require_streamed_format("packed", "prune")


def test_the_table_waits_for_no_torch() -> None:
    code = """
import sys
from lyapunov_prune.export.table import FORMATS
dict(FORMATS)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
