"""Runs of the command line: their figures are made but not drawn, and what many begin with is made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import matplotlib.figure
import pytest
from helpers import TEXT, Done


@pytest.fixture
def drawn() -> None:
    """Figures are drawn to the last letter, as for users."""


@pytest.fixture(autouse=True)
def _made_not_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters and layout take most of the time of a page, and tests/report looks at each figure."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, file, **_: file.write("<svg></svg>"))


@pytest.fixture(scope="session")
def _prunings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prunings")


@pytest.fixture
def pruned(run: Callable[..., Done], _prunings: Path) -> Callable[..., None]:
    """`tiny` without these layers in the folder `out`: `prune` as every test would run it, once for all."""

    def make(layers: str) -> None:
        kept = _prunings / layers
        if not kept.exists():
            assert run("prune", "tiny", "--layers", layers, "-o", "out", *TEXT).code == 0
            shutil.copytree("out", kept)
        else:
            shutil.copytree(kept, "out")

    return make
