"""Interrupted runs go on where they stopped; two runs never share a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers import TEXT, Done

from lyapunov_prune.bounds import check as checks_module
from lyapunov_prune.forward import own_text
from lyapunov_prune.pruning import surgery
from lyapunov_prune.sensitivity.sweep import Sweep

INTERRUPTIBLE = {
    "sensitivity": (Sweep, "_measure", ["sensitivity", "tiny", "--study", "layer,removal", *TEXT]),
    "check": (checks_module, "_outcome", ["check", "tiny", "--bounds", "--tokens", "16", "--context", "16"]),
}


@pytest.mark.parametrize("name", INTERRUPTIBLE)
def test_an_interrupted_run_goes_on_where_it_stopped(
    name: str, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, arguments = INTERRUPTIBLE[name]
    work, calls, limit = getattr(owner, attribute), [0], [5]

    def counted(*args: Any, **kwargs: Any) -> Any:
        if calls[0] == limit[0]:
            raise KeyboardInterrupt
        calls[0] += 1
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, counted)
    whole = {"sensitivity": 13, "check": 30}[name]  # the dense model, six layers twice; thirty settings
    stopped = run(*arguments)
    assert stopped.code == 130
    assert stopped.err == "stopped; runs/jobs keeps what is finished, and the same command continues there\n"
    limit[0] = whole
    done = run(*arguments)
    assert (done.code, calls[0]) == (0, whole)
    again = run(*arguments)
    assert (again.code, calls[0]) == (0, whole)
    assert again.out == done.out
    assert not again.changed


def test_what_was_finished_on_other_text_stays_and_is_said_nothing_of(run: Callable[..., Done]) -> None:
    """It was deleted, with a word on stderr."""
    arguments = ["sensitivity", "tiny", "--study", "removal"]
    other = ["--tokens", "192", "--context", "64"]
    assert run(*arguments, "-o", "run", *TEXT).code == 0
    before = {path: path.read_bytes() for path in Path("runs/jobs").rglob("*.jsonl")}
    done = run(*arguments, "-o", "run", *other)
    assert (done.code, done.err) == (0, "")
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(list(Path("runs/jobs").glob("sweep-*"))) == 2


def test_an_interruption_is_exit_code_130(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(surgery, "cut", interrupt)
    done = run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT)
    assert (done.code, done.changed) == (130, set())
    assert done.err == "stopped; nothing was finished\n"


def test_a_second_run_of_one_training_is_refused_before_it_writes_its_text(
    run: Any, run_bad: Callable[..., str], pruned: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned("1")
    heal = ("heal", "out", "--teacher", "tiny", "-o", "healed", "--steps", "1", "--tokens", "256", "--context", "32")
    written = own_text.continued

    def meanwhile(*args: Any) -> Any:
        monkeypatch.setattr(own_text, "continued", lambda *_: pytest.fail("it writes"))
        assert "another run is at work" in run_bad(*heal)
        monkeypatch.setattr(own_text, "continued", written)
        return written(*args)

    monkeypatch.setattr(own_text, "continued", meanwhile)
    assert run(*heal).code in (0, 1)  # a random model gains nothing
