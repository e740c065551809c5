"""What a run finds in its folder is taken only where it is what the run would measure."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import QUICK, TEXT, Done

from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

SENSITIVITY = ["sensitivity", "tiny", "--study", "removal", "-o", "run", *TEXT]
OWN = Path("run/sensitivity/profile.json")


def test_sensitivity_leaves_the_profile_as_it_is(run: Callable[..., Done]) -> None:
    run("profile", "tiny", "-o", "run", *QUICK)
    before = Path("run/profile.json").read_bytes()
    assert run(*SENSITIVITY).code == 0
    assert Path("run/profile.json").read_bytes() == before
    assert len(LayerProfile.load(OWN).contraction.seeds) == 2
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "<h2>Contraction and Block Influence</h2>" in page
    assert "<h2>Contraction and Block Influence: sensitivity/</h2>" in page


def test_rank_replaces_no_profile_of_other_settings(run: Callable[..., Done]) -> None:
    run("profile", "tiny", "-o", "run", *TEXT)
    before = Path("run/profile.json").read_bytes()
    rho = ["rank", "tiny", "--criterion", "rho", "-o", "run", *TEXT]
    done = run(*rho, "--tokens", "192")
    assert done.code == 2
    assert "run/profile.json would be replaced" in done.err
    assert Path("run/profile.json").read_bytes() == before
    assert run("rank", "run/profile.json").code == 0
    for _ in range(2):
        assert run(*rho).code == 0
        assert Path("run/profile.json").read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [
        ["--seeds", "2", "--epsilon", "0.1"],
        ["--seeds", "3"],
    ],
    ids=" ".join,
)
def test_no_profile_is_taken_of_other_settings(other: list[str], run: Callable[..., Done]) -> None:
    run(*SENSITIVITY)
    wanted = OWN.read_bytes()
    scores = Sensitivity.load("run/sensitivity.json").scores
    assert run("profile", "tiny", "-o", "run", *TEXT, *other).code == 0
    shutil.copy("run/profile.json", OWN)
    assert run(*SENSITIVITY).code == 0
    assert OWN.read_bytes() == wanted
    again = Sensitivity.load("run/sensitivity.json").scores
    assert {name: values.tolist() for name, values in again.items()} == {k: v.tolist() for k, v in scores.items()}
