"""The decisions of a run of healing, from judged losses alone, drawn at random and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.healing.rounds import (
    FACTOR,
    LEAST_TRIALS,
    PATIENCE,
    ROUNDS,
    TRIAL,
    TRIED,
    WARM_UP,
    Round,
    Stretch,
    best_of,
    next_stretch,
    rates,
    schedule,
)

BEFORE = np.array([4.0, 5.0, 4.5, 5.5])
RATE = 1e-3
LOSSES = st.one_of(st.floats(3, 7), st.just(math.inf), st.just(math.nan))
PER_WINDOW = st.lists(LOSSES, min_size=4, max_size=4)
STEPS = st.one_of(st.integers(1, 30), st.integers(30, 2000))


def play(
    judge: Callable[[Stretch], np.ndarray], steps: int | None, trials: int, before: np.ndarray = BEFORE
) -> list[Round]:
    """All rounds of a run whose stretches are judged so."""
    rounds: list[Round] = []
    while (stretch := next_stretch(rounds, before, rate=RATE, steps=steps, trials=trials)) is not None:
        rounds.append(Round(stretch, judge(stretch)))
        assert len(rounds) < 100
    return rounds


def valley(best: float) -> Callable[[Stretch], np.ndarray]:
    """A loss below that of BEFORE only near a rate, least there."""
    return lambda stretch: BEFORE - 1 + abs(math.log(stretch.rate / best))


def parts(rounds: list[Round]) -> tuple[list[Round], list[Round]]:
    """Trials, and the run."""
    tried = [each for each in rounds if each.stretch.trial]
    return tried, rounds[len(tried) :]


# What holds whatever the losses are.


@settings(max_examples=100)
@given(st.lists(PER_WINDOW, min_size=40, max_size=40), STEPS, st.integers(0, 8))
def test_a_run_stays_within_its_steps_and_trials(drawn: list[list[float]], steps: int, trials: int) -> None:
    judged = iter(drawn)
    rounds = play(lambda _: np.array(next(judged)), steps, trials)
    tried, run = parts(rounds)
    assert sum(each.stretch.steps for each in rounds) <= steps
    assert all(each.stretch.steps >= 1 for each in rounds)
    assert not any(each.stretch.trial for each in run)
    assert len(run) <= ROUNDS
    assert len(tried) <= trials
    assert len(tried) * TRIAL <= TRIED * steps
    assert len(run) >= 1  # trials never take all of the steps
    assert all(each.stretch.begin == "start" and each.stretch.steps == TRIAL for each in tried)
    assert len({each.stretch.rate for each in tried}) == len(tried)
    assert run[0].stretch.begin == "best"
    taken = 0
    for each in run:
        assert each.stretch.taken == taken
        taken += each.stretch.steps
    for last, this in pairwise(run):
        back = this.stretch.begin == "best"
        assert this.stretch.rate == pytest.approx(last.stretch.rate / (FACTOR if back else 1))
        assert back or this.stretch.begin == "here"


@settings(max_examples=100)
@given(st.lists(PER_WINDOW, min_size=40, max_size=40), STEPS, st.integers(0, 8))
def test_a_run_ends_with_its_steps_or_when_nothing_new_was_best_for_a_while(
    drawn: list[list[float]], steps: int, trials: int
) -> None:
    judged = iter(drawn)
    rounds = play(lambda _: np.array(next(judged)), steps, trials)
    _, run = parts(rounds)
    since = len(rounds) - 1 - best_of(rounds, BEFORE)  # rounds behind the best, trials among them
    ended = sum(each.stretch.steps for each in rounds) == steps
    assert ended or min(since, len(run)) == PATIENCE


@settings(max_examples=100)
@given(st.lists(PER_WINDOW, max_size=12))
def test_the_best_is_the_least_mean_and_never_above_the_start(drawn: list[list[float]]) -> None:
    rounds = [Round(Stretch("here", False, RATE, 1), np.array(each)) for each in drawn]
    best = best_of(rounds, BEFORE)
    means = [each.mean for each in rounds]
    if best < 0:
        assert all(mean >= BEFORE.mean() for mean in means)
    else:
        assert means[best] == min(means) < BEFORE.mean()
        assert best == means.index(min(means))


# Trials.


@settings(max_examples=100)
@given(st.floats(-2, 2), st.integers(3, 8))
def test_trials_go_on_until_the_best_has_a_worse_one_on_either_side(exponent: float, trials: int) -> None:
    rounds = play(valley(RATE * 10**exponent), 1000, trials)
    tried, run = parts(rounds)
    tested = sorted((each.stretch.rate, each.mean) for each in tried)
    assert all(b / a == pytest.approx(FACTOR) for (a, _), (b, _) in pairwise(tested))
    means = [mean for _, mean in tested]
    best = means.index(min(means))
    assert len(tried) == trials or 0 < best < len(means) - 1
    if min(means) < BEFORE.mean():
        assert run[0].stretch.rate == tested[best][0]


def test_rates_that_help_nothing_are_lowered_to_the_end_and_the_least_is_taken() -> None:
    for worse in (BEFORE + 1, np.full(4, math.inf), np.full(4, math.nan)):
        tried, run = parts(play(lambda _, worse=worse: worse, 1000, 6))
        assert [each.stretch.rate for each in tried] == pytest.approx([RATE / FACTOR**k for k in range(6)])
        assert run[0].stretch.rate == tried[-1].stretch.rate


def test_the_run_begins_with_the_best_rate_even_where_others_exploded() -> None:
    """√10 higher is not finite; less is worse."""

    def judge(stretch: Stretch) -> np.ndarray:
        return np.full(4, math.inf) if stretch.rate > 1.5 * RATE else BEFORE - 100 * stretch.rate

    tried, run = parts(play(judge, 1000, 6))
    assert [each.stretch.rate for each in tried] == pytest.approx([RATE, RATE / FACTOR, RATE * FACTOR])
    assert run[0].stretch.rate == RATE


@pytest.mark.parametrize(("steps", "trials"), [(1, 0), (39, 0), (40, 3), (53, 3), (54, 4), (80, 6), (1000, 6)])
def test_there_are_as_many_trials_as_the_steps_allow_and_never_fewer_than_three(steps: int, trials: int) -> None:
    tried, run = parts(play(lambda _: BEFORE + 1, steps, 6))
    assert len(tried) == trials
    assert trials == 0 or trials >= LEAST_TRIALS
    if not trials:
        assert run[0].stretch.rate == RATE


def test_while_the_steps_are_not_known_there_are_trials_alone() -> None:
    rounds = play(valley(RATE), None, 6)
    assert all(each.stretch.trial for each in rounds)
    assert len(rounds) == 3
    assert len(play(valley(RATE), None, 1)) == 1


# Going back, and the end.


def test_a_rise_by_the_test_goes_back_to_the_best_at_a_lower_rate_and_one_by_chance_does_not() -> None:
    first = Round(Stretch("best", False, RATE, 10), BEFORE - 1)
    for judged, goes_back in [
        (BEFORE - 0.5, True),  # every window rose by as much
        (BEFORE - 1 + np.array([0.4, -0.3, 0.4, -0.3]), False),  # the mean rose by 0.05, of windows that go both ways
        (np.array([4.0, 4.0, math.inf, 4.0]), True),
        (np.array([4.0, 4.0, math.nan, 4.0]), True),
        (BEFORE - 2, False),
    ]:
        second = Round(Stretch("here", False, RATE, 10, 10), judged)
        found = next_stretch([first, second], BEFORE, rate=RATE, steps=60, trials=0)
        assert found == Stretch("best" if goes_back else "here", False, RATE / FACTOR if goes_back else RATE, 10, 20), (
            judged
        )


def test_where_nothing_was_better_it_goes_back_to_the_start() -> None:
    rounds = [Round(Stretch("best", False, RATE, 10), BEFORE + 1)]
    found = next_stretch(rounds, BEFORE, rate=RATE, steps=60, trials=0)
    assert found is not None
    assert (found.begin, best_of(rounds, BEFORE)) == ("best", -1)


def test_patience_ends_a_run_that_finds_nothing_better() -> None:
    assert len(play(lambda _: BEFORE + 1, 600, 0)) == PATIENCE
    judged = iter([BEFORE - 1, BEFORE - 2, *(BEFORE - 1.5 for _ in range(10))])
    assert len(play(lambda _: next(judged), 600, 0)) == min(ROUNDS, 2 + PATIENCE)


def test_a_run_that_never_beats_its_best_trial_ends_too() -> None:
    def judge(stretch: Stretch) -> np.ndarray:
        return valley(RATE)(stretch) if stretch.trial else BEFORE + 1

    tried, run = parts(play(judge, 1000, 6))
    assert len(run) == PATIENCE
    assert best_of([*tried, *run], BEFORE) < len(tried)


# Rates.


@given(st.integers(1, 500))
def test_the_schedule_rises_once_to_its_height_and_falls_never_to_zero(steps: int) -> None:
    shares = [schedule(step, steps) for step in range(steps)]
    top = shares.index(1.0)
    assert top == int(WARM_UP * steps)
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert shares[top:] == sorted(shares[top:], reverse=True)
    assert 0 < min(shares) <= max(shares) == 1


@given(st.integers(1, 400), st.floats(1e-8, 10))
def test_rounds_that_all_go_on_follow_one_schedule(steps: int, rate: float) -> None:
    found: list[float] = []
    losses = iter(range(100))
    for each in play(lambda _: BEFORE - next(losses), steps, 0):
        stretch = each.stretch
        found += rates(Stretch(stretch.begin, False, rate, stretch.steps, stretch.taken), steps)
    assert found == pytest.approx([rate * schedule(step, steps) for step in range(steps)])


@given(st.integers(2, 400), st.data())
def test_weights_that_were_gone_back_to_warm_up_again(left: int, data: st.DataObject) -> None:
    taken = data.draw(st.integers(1, left - 1))
    steps = data.draw(st.integers(1, left - taken))
    on, back = (rates(Stretch(begin, False, RATE, steps, taken), left) for begin in ("here", "best"))  # type: ignore[arg-type]
    rise = int(WARM_UP * left)
    assert len(on) == len(back) == steps
    assert all(0 < b <= a for a, b in zip(on, back, strict=True))
    assert back[rise:] == on[rise:]
    assert back[0] == pytest.approx(on[0] / (rise + 1))


def test_a_trial_rises_to_its_peak() -> None:
    assert rates(Stretch("start", True, RATE, 4), 0) == pytest.approx([RATE / 4, RATE / 2, 3 * RATE / 4, RATE])
