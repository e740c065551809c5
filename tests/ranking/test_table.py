"""The criteria as formulas of what was measured, and what is refused at the very edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.ranking.counts import count_of, free_layers, protected_layers, require_count, search_budget
from lyapunov_prune.ranking.criteria.blend import Blend
from lyapunov_prune.ranking.criteria.blend import robust as _robust
from lyapunov_prune.ranking.criteria.blend_minmax import minmax
from lyapunov_prune.ranking.criterion import Scored
from lyapunov_prune.ranking.table import CRITERIA, DEFAULT, default_criterion, require_ranks


def robust(x: np.ndarray) -> np.ndarray:
    """Quartiles by hand: at (n − 1) k / 4 of the sorted, between two of them linear."""
    ordered = np.sort(x)

    def at(share: float) -> float:
        place = share * (len(x) - 1)
        low = int(np.floor(place))
        return float(ordered[low] + (place - low) * (ordered[min(low + 1, len(x) - 1)] - ordered[low]))

    span = at(0.75) - at(0.25)
    if span <= 1e-12 * (ordered[-1] - ordered[0]):
        span = ordered[-1] - ordered[0]
    return (x - at(0.5)) / (span or 1)


@settings(max_examples=100)
@given(arrays(np.float64, st.integers(1, 9), elements=st.floats(-100, 100, width=16)))
def test_a_blend_is_about_the_median_by_the_quartiles(x: np.ndarray) -> None:
    np.testing.assert_allclose(_robust(x), robust(x), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(_robust(np.stack([x, 2 * x + 1])), [robust(x), robust(2 * x + 1)], rtol=1e-9, atol=1e-9)
    bi = np.linspace(0, 1, len(x)) ** 2
    for alpha in (0.0, 0.3, 1.0):
        wanted = alpha * robust(np.abs(x - 1)) + (1 - alpha) * robust(bi)
        np.testing.assert_allclose(Blend(alpha=alpha).score({"rho": x, "bi": bi}), wanted, rtol=1e-9, atol=1e-9)


def test_equal_quartiles_go_by_the_whole_range() -> None:
    assert _robust(np.array([0.0, 0, 0, 0, 5])).tolist() == [0, 0, 0, 0, 1]
    assert _robust(np.array([3.0, 3, 3])).tolist() == [0, 0, 0]


def test_the_scale_of_the_paper_is_from_0_to_1() -> None:
    assert minmax(np.array([1.0, 5, 2])).tolist() == [0, 1, 0.25]
    assert minmax(np.array([[1.0, 3], [7, 7]])).tolist() == [[0, 1], [0, 0]]


def test_scores_are_their_formulas() -> None:
    values = {"rho": np.array([0.5, 1.25, 1.0]), "bi": np.array([0.1, 0.3, 0.2]), "variance": np.array([3.0, 1, 2])}
    values |= {"layer": np.arange(3.0), "lot": np.array([2, 0, 1]), "variance_r": np.array([1.0, 3, 2])}
    wanted = {
        "rho": [0.5, 0.25, 0],
        "bi": [0.1, 0.3, 0.2],
        "blend-minmax": pytest.approx([0.5, 0.75, 0.25]),
        "kl": [3, 1, 2],
        "cosine": [1, 3, 2],
        "from-end": [2, 1, 0],
        "random": [2, 0, 1],
    }
    for name, scores in wanted.items():
        made = CRITERIA.make(name)
        assert isinstance(made, Scored)
        assert made.score(values).tolist() == scores, name


def test_counts_at_the_edge() -> None:
    require_count(5, 6)
    require_count(6, 6, "mlp")
    require_count(1, 2)
    for remove, what, most in ((6, "layers", 5), (0, "layers", 5), (7, "mlp", 6), (-1, "attention", 6)):
        with pytest.raises(LyapunovPruneError, match=f"give 1 to {most}"):
            require_count(remove, 6, what)
    with pytest.raises(LyapunovPruneError, match="1 of 1 layers"):
        require_count(1, 1)


def test_protected_layers_at_the_edge() -> None:
    assert protected_layers(6, (-1, 0, 5, -6, 2)) == (0, 2, 5)
    assert free_layers(6, (-1, 0)) == (1, 2, 3, 4)
    assert protected_layers(6, (0, 1, 2), 3) == (0, 1, 2)
    with pytest.raises(LyapunovPruneError, match="protected, and 4"):
        protected_layers(6, (0, 1, 2), 4)
    for outside in (6, -7):
        with pytest.raises(LyapunovPruneError, match=f"layer {outside} to protect"):
            protected_layers(6, (1, outside))


def test_numbers_at_the_edge() -> None:
    for alpha in (0, 1):
        CRITERIA.make("blend", alpha=alpha)
    for alpha in (-0.001, 1.001, np.nan):
        with pytest.raises(LyapunovPruneError, match=f"alpha.* {alpha}"):
            CRITERIA.make("blend", alpha=alpha)
    CRITERIA.make("kl", temperature=0.5)
    for temperature in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(LyapunovPruneError, match="temperature"):
            CRITERIA.make("kl", temperature=temperature)
    with pytest.raises(LyapunovPruneError, match=r"bi .*temperature.* kl"):
        CRITERIA.make("bi", temperature=0.5)


KNOWN = ("rho", "bi", "blend", "blend-minmax", "angular", "kl", "reap", "frequency", "cosine", "oracle", "best")
KNOWN += ("from-end", "random")


def ranked(what: str = "layers", **asked: Any) -> set[str]:
    """Which of the known criteria rank it; a new one says so in its own test."""
    found = set()
    for name in KNOWN:
        try:
            require_ranks(name, what, **asked)
        except LyapunovPruneError:
            continue
        found.add(name)
    return found


def test_who_ranks_what() -> None:
    """The criteria of each kind, as the guide lists them."""
    of_layers = set(KNOWN) - {"reap", "frequency"}
    alone = of_layers - {"angular", "oracle", "best"}
    assert ranked(remove=2) == of_layers
    assert ranked("experts", remove=2) == {"reap", "frequency", "kl"}
    assert ranked("experts", remove=2, streamed=True) == {"reap", "frequency"}
    assert ranked("experts", remove=2, profiled=True) == ranked("experts", remove=2, protect=True) == set()
    assert ranked(remove=None) == alone
    assert ranked("attention", remove=2) == {"bi", "kl", "cosine", "from-end", "random"}
    assert ranked("activation", remove=2) == set()
    assert ranked(remove=2, streamed=True) == of_layers - {"oracle", "best"}
    assert ranked("attention", remove=2, streamed=True) == {"bi", "from-end", "random"}
    assert ranked(remove=2, profiled=True) == {"rho", "bi", "blend", "blend-minmax", "from-end", "random"}
    assert ranked("attention", remove=2, profiled=True) == set()


def test_best_is_taken_where_whole_layers_go_and_their_number_is_known() -> None:
    assert default_criterion(2) == default_criterion(0.25) == "best"
    assert default_criterion(None) == default_criterion(2, "attention") == DEFAULT
    assert DEFAULT == "bi"


def test_the_budget_of_a_search_grows_with_the_swaps_that_there_are() -> None:
    assert search_budget(30, 7) == pytest.approx(10, abs=0.1)
    assert search_budget(30, 7, mend=True) == 3 * search_budget(30, 7)
    assert search_budget(80, 20) == 5 + 20 * 60 / 32


def test_a_share_is_the_nearest_number_and_at_least_one() -> None:
    assert [count_of(share, 30) for share in (0.25, 0.2, 0.01, 0.99)] == [8, 6, 1, 30]
    assert count_of(7, 30) == count_of(np.int64(7), 30) == 7
