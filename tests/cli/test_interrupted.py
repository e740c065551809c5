"""Interrupted runs go on where they stopped; two runs never share a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers import COMMANDS, TEXT, Done

from lyapunov_prune.bounds import check as checks_module
from lyapunov_prune.cli.inputs import folder_name
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.pruning import surgery
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.sweep import Sweep

INTERRUPTIBLE = {
    "sensitivity": (Sweep, "_measure", ["sensitivity", "tiny", "--study", "layer,removal", *TEXT]),
    "check": (checks_module, "_outcome", ["check", "tiny", "--tokens", "64", "--context", "32"]),
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
    assert stopped.err == f"stopped; runs/tiny/jobs/{name} keeps what is finished; the same command continues there\n"
    limit[0] = whole
    done = run(*arguments)
    assert (done.code, calls[0]) == (0, whole)
    again = run(*arguments)
    assert (again.code, calls[0]) == (0, whole)
    assert again.out == done.out
    assert not again.changed


def test_on_other_text_it_starts_afresh_and_says_so(run: Callable[..., Done]) -> None:
    arguments = ["sensitivity", "tiny", "--study", "removal"]
    other = ["--tokens", "192", "--context", "64"]
    assert run(*arguments, "-o", "run", *TEXT).code == 0
    done = run(*arguments, "-o", "run", *other)
    assert done.code == 0
    assert "run/jobs/sensitivity held unfinished work on another text_hash" in done.err
    assert run(*arguments, "-o", "fresh", *other).code == 0
    assert Path("run/sensitivity.json").read_bytes() == Path("fresh/sensitivity.json").read_bytes()


def test_an_interruption_is_exit_code_130(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(surgery, "cut", interrupt)
    done = run(*COMMANDS["prune"])
    assert (done.code, done.changed) == (130, set())
    assert done.err == "stopped; unfinished work was not kept\n"


def test_a_second_run_in_a_folder_at_work_is_refused_in_one_line(run: Any, run_bad: Callable[..., str]) -> None:
    assert run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT).code == 0
    jobs = Path("runs/out/jobs") / f"heal-{folder_name(str(Path('healed').resolve()))}"
    with TrainingState(jobs, {}) as state, Store("runs/tiny/jobs/sensitivity", "sweep", {}) as store:
        state.hold()
        store.add("a", 1)
        assert "another run is at work" in run_bad(
            "heal", "out", "--teacher", "tiny", "-o", "healed", "--steps", "1", *TEXT
        )
        assert "another run is at work" in run("sensitivity", "tiny", *TEXT).err
        assert store.items() == {"a": 1}
