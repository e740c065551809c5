"""Rounds on a tiny model: the best weights are kept, time and steps are kept to, and a run goes on where it stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import PartialState
from healing.test_heal import pair

from lyapunov_prune.errors import Diverged, LyapunovPruneError
from lyapunov_prune.healing import training as module
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.rounds import FACTOR, TRIAL, best_of
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import drawn_order, trained
from lyapunov_prune.healing.training import Budget, Training, Way

IDS = torch.randint(97, (7, 12), generator=torch.Generator().manual_seed(5))
BEFORE = np.array([4.0, 5.0, 4.5, 5.5])
Judge = Callable[[], np.ndarray]


@contextmanager
def started() -> Iterator[Distillation]:
    student, teacher = pair()
    with trained(student, None, 0) as parameters:
        yield Distillation(student, teacher, parameters, 1.0)


@pytest.fixture
def run() -> Iterator[Distillation]:
    with started() as run:
        yield run


def training(
    run: Distillation,
    judge: Judge,
    budget: Budget,
    *,
    state: TrainingState | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    per_step: int = 1,
    start: Mapping[str, torch.Tensor] | None = None,
) -> Training:
    return Training(
        run,
        IDS,
        judge,
        start or run.copies(),
        Way(budget, per_step, None, 1.0, 3, shard=False, narrow=False, processes=PartialState(cpu=True)),
        state or TrainingState(None, {}),
        list((tensors or {}).items()),
    )


def losses(*of_rounds: float) -> Judge:
    """Of each judging in turn (before training first), above or below BEFORE by so much; the last for ever."""
    given = list(of_rounds)
    return lambda: BEFORE + (given.pop(0) if len(given) > 1 else given[0])


def rates_of(done: Training) -> list[float]:
    return [each.stretch.rate for each in done.done.rounds]


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def test_the_weights_of_the_best_round_are_kept_and_gone_back_to(run: Distillation) -> None:
    kept: list[dict[str, torch.Tensor]] = []
    given = iter([0.0, -1.0, -2.0, -0.5, -0.5, -0.5])

    def judge() -> np.ndarray:
        kept.append(run.copies())
        return BEFORE + next(given)

    begun: list[Mapping[str, torch.Tensor]] = []
    anew = run.begin_anew
    run.begin_anew = lambda weights=None: (begun.append(dict(weights or {})), anew(weights))[1]  # type: ignore[method-assign, func-returns-value]
    done = training(run, judge, Budget(60, None, 1e-4, 0))
    done.finish()
    assert same(done.weights, kept[2])
    assert best_of(done.done.rounds, done.done.before) == 1
    assert rates_of(done) == pytest.approx([1e-4, 1e-4, 1e-4, 1e-4 / FACTOR, 1e-4 / FACTOR**2])
    assert same(begun[0], kept[0])
    assert all(same(weights, kept[2]) for weights in begun[1:])
    assert len(begun) == 3


def test_without_a_better_round_the_weights_are_those_at_the_start(run: Distillation) -> None:
    start = run.copies()
    done = training(run, losses(0.0, 1.0), Budget(100, None, 1e-4, 6), start=start)
    done.finish()
    assert done.weights is start
    assert not same(run.copies(), start)


def test_trials_all_begin_at_the_start_on_the_same_windows_and_the_run_on_others(
    run: Distillation, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, taken, begun = run.copies(), list[torch.Tensor](), list[bool]()
    take_step = Distillation.take_step

    def note(self: Distillation, ids: torch.Tensor, rate: float) -> None:
        taken.append(ids)
        begun.append(same(self.copies(), start))
        take_step(self, ids, rate)

    monkeypatch.setattr(Distillation, "take_step", note)
    done = training(run, losses(0.0, -0.1, -0.05, -0.05, -0.2), Budget(48, None, 1e-3, 3), per_step=2)
    done.finish()
    assert [each.stretch.trial for each in done.done.rounds][:4] == [True] * 3 + [False]
    order = drawn_order(len(IDS), 2 * 48, 3)
    first = IDS[order[: 2 * TRIAL]].split(2)
    for trial in range(3):
        assert all(map(torch.equal, taken[TRIAL * trial : TRIAL * (trial + 1)], first))
        assert begun[TRIAL * trial]
    assert not begun[3 * TRIAL]  # from the best trial's weights
    rest = IDS[order[2 * TRIAL : 2 * (48 - 2 * TRIAL)]].split(2)
    assert all(map(torch.equal, taken[3 * TRIAL :], rest))


# What is not finite.


def test_a_rate_that_explodes_is_infinitely_bad_and_gone_back_from(
    run: Distillation, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_step = Distillation.take_step

    def explodes(self: Distillation, ids: torch.Tensor, rate: float) -> None:
        if rate > 2e-3:
            raise Diverged("the loss is not finite")
        take_step(self, ids, rate)

    monkeypatch.setattr(Distillation, "take_step", explodes)
    steadily = iter(range(1000))
    done = training(run, lambda: BEFORE - 0.01 * next(steadily), Budget(100, None, 8e-3, 6))
    done.finish()
    first = done.done.rounds[0]
    assert np.isinf(first.judged).all()
    assert np.isnan(run.losses[TRIAL - 1])
    assert len(run.losses) == run.step == 100
    peak = next(each.stretch.rate for each in done.done.rounds if not each.stretch.trial)
    assert peak < 8e-3
    assert np.isfinite(np.array(run.losses[-50:])).all()


def test_the_very_first_step_blames_no_rate(run: Distillation) -> None:
    run.teacher.get_output_embeddings().weight.data[3] = math.nan
    with pytest.raises(Diverged, match="step 0 is not finite"):
        training(run, losses(0.0, -1.0), Budget(100, None, 1e-3, 6)).finish()


def test_a_judged_loss_that_is_not_finite_at_the_start_is_refused(run: Distillation) -> None:
    with pytest.raises(LyapunovPruneError, match="validation window"):
        training(run, lambda: np.array([1.0, math.nan]), Budget(100, None, 1e-3, 6))


# Time, by a clock that a step and a judging move on; steps do nothing else.


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float, judging: float) -> None:
        self.now, self._judging = 1000.0, judging
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

        def slow(run: Distillation, ids: torch.Tensor, rate: float) -> None:
            self.now += step
            run.losses.append(0.0)

        monkeypatch.setattr(Distillation, "take_step", slow)

    def judge(self, of: Judge) -> Judge:
        def slow() -> np.ndarray:
            self.now += self._judging
            return of()

        return slow


@pytest.mark.parametrize("trials", [1, 6])
@pytest.mark.parametrize(("step", "judging"), [(1.0, 0.0), (0.5, 5.0), (3.0, 6.0)])
@pytest.mark.parametrize("minutes", [2.0, 5.0])
def test_minutes_bound_the_run_with_trials_and_judging(
    minutes: float, step: float, judging: float, trials: int, run: Distillation, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, step, judging)
    steadily = iter(range(1000))
    done = training(run, clock.judge(lambda: BEFORE - 0.01 * next(steadily)), Budget(None, minutes, 1e-4, trials))
    done.finish()
    took = clock.now - 1000
    assert took <= 60 * minutes
    assert took >= 0.8 * 60 * minutes  # and are used
    assert done.done.seconds == pytest.approx(took)
    tried = sum(each.stretch.trial for each in done.done.rounds)
    assert 1 <= tried <= trials


def test_minutes_too_short_for_more_leave_one_trial(run: Distillation, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 30.0, 10.0)
    done = training(run, clock.judge(losses(0.0, -1.0)), Budget(None, 1.0, 1e-4, 6))
    done.finish()
    assert [each.stretch.trial for each in done.done.rounds] == [True]
    assert done.weights is not done.start


@pytest.mark.parametrize("steps", [5, 60])
def test_of_steps_and_minutes_the_shorter_counts(
    steps: int, run: Distillation, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, 1.0, 0.0)
    steadily = iter(range(1000))
    done = training(run, clock.judge(lambda: BEFORE - 0.01 * next(steadily)), Budget(steps, 30.0, 1e-4, 6))
    done.finish()
    assert run.step == steps
    assert any(each.stretch.trial for each in done.done.rounds) == (steps == 60)


def test_steps_that_become_slower_end_at_the_next_round(run: Distillation, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0, 0.0)
    slower = iter([0, 0, 0, 1000])

    def judge() -> np.ndarray:
        clock.now += next(slower)
        return BEFORE - 1 - 1e-6 * clock.now

    done = training(run, judge, Budget(None, 4.0, 1e-4, 1))
    done.finish()
    assert run.step < 200
    assert len(done.done.rounds) == 3


# Going on.


class Stop(Exception):
    pass


def stops_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take_step = Distillation.take_step

    def stop(self: Distillation, ids: torch.Tensor, rate: float) -> None:
        if self.step == step:
            raise Stop
        take_step(self, ids, rate)

    monkeypatch.setattr(Distillation, "take_step", stop)


# Of 48 steps: trials end at 4, 8 and 12; the rounds of 6 at 18, which goes back, and so on.
BUDGET = Budget(48, None, 1e-3, 3)
JUDGED = {0: 0.0, 4: -0.3, 8: -0.2, 12: -0.4, 18: 0.5, 24: -0.6, 30: -0.7, 36: math.inf, 42: -0.8, 48: -0.75}


@pytest.fixture(scope="module")
def whole() -> Iterator[tuple[Distillation, Training]]:
    """A run that nothing interrupts, and what it trained."""
    with started() as run:
        done = training(run, lambda: BEFORE + JUDGED[run.step], BUDGET)
        done.finish()
        yield run, done


# A state before every step, or a third of them and of the ends of rounds, where rounds begin that are not yet kept.
@pytest.mark.parametrize(
    ("step", "every"),
    [*((step, 1) for step in (2, 15, 33)), *((step, 3) for step in (4, 18, 24))],
)
def test_a_run_goes_on_from_anywhere_to_the_same_end(
    step: int,
    every: int,
    whole: tuple[Distillation, Training],
    run: Distillation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never, done = whole
    start = run.copies()
    assert [each.stretch.begin for each in done.done.rounds].count("best") == 3

    def again() -> Training:
        run.losses = []
        run.begin_anew(start)
        with TrainingState(tmp_path, {}) as state:
            asked = count(1)
            monkeypatch.setattr(state, "is_due", lambda: next(asked) % every == 0)
            going = training(
                run, lambda: BEFORE + JUDGED[run.step], BUDGET, state=state, tensors=state.load(), start=start
            )
            going.finish()
        return going

    with pytest.MonkeyPatch.context() as patch:
        stops_at(step, patch)
        with pytest.raises(Stop):
            again()
    resumed = again()
    assert same(run.copies(), never.copies())
    assert same(resumed.weights, done.weights)
    assert run.losses == never.losses
    rounds = [[(each.stretch, each.judged.tolist()) for each in run.done.rounds] for run in (resumed, done)]
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("step", [2, 4, 6, 20])
def test_a_run_by_minutes_goes_on_with_the_time_that_is_left(
    step: int, run: Distillation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, 1.0, 0.0)
    budget, start = Budget(None, 2.0, 1e-3, 3), run.copies()

    def again() -> Training:
        with TrainingState(tmp_path, {}) as state:
            monkeypatch.setattr(state, "is_due", lambda: True)
            going = training(
                run, lambda: BEFORE - 0.001 * run.step, budget, state=state, tensors=state.load(), start=start
            )
            going.finish()
        return going

    with pytest.MonkeyPatch.context() as patch:
        stops_at(step, patch)
        with pytest.raises(Stop):
            again()
    began, clock.now = clock.now, clock.now + 1e6  # while nothing ran
    run.losses = []
    run.begin_anew(start)
    resumed = again()
    assert len(run.losses) == sum(each.stretch.steps for each in resumed.done.rounds)
    assert clock.now - 1e6 - 1000 <= 2 * 60 + 2
    assert clock.now - 1e6 > began
