"""`import lyapunov_prune` gives every public name, and imports what it needs when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lyapunov_prune


@pytest.mark.parametrize("name", lyapunov_prune.__all__)
def test_a_public_name_is_what_it_says(name: str) -> None:
    assert getattr(lyapunov_prune, name).__name__ == name
    assert name in dir(lyapunov_prune)


def test_every_name_has_one_home() -> None:
    homes = [name for names in lyapunov_prune._HOMES.values() for name in names]
    assert sorted(homes) == sorted(lyapunov_prune.__all__)


def test_norms_are_reached_through_linalg() -> None:
    assert lyapunov_prune.linalg.certified_norm.__name__ == "certified_norm"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lyapunov_prune' has no attribute 'unknown'"):
        _ = lyapunov_prune.unknown


def test_star_brings_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from lyapunov_prune import *", names)
    assert set(lyapunov_prune.__all__) <= names.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["prune", "--help"],
        ["prune"],
        ["--unknown"],
        ["unknown"],
        ["rank", "smollm2-135m", "--criterion", "best"],
        ["prune", "smollm2-135m", "-o", "out", "--remove", "2", "--what", "norms"],
    ],
    ids=" ".join,
)
def test_help_and_usage_errors_wait_for_no_heavy_import(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from lyapunov_prune.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'matplotlib', 'scipy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True)
