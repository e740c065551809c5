"""Work on one question has a folder of its own and, alone, one run at a time; nothing beside it is touched."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import make_tiny

from lyapunov_prune.bounds.check import check_grid
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.healing.heal import heal
from lyapunov_prune.ranking.oracle import greedy_removal
from lyapunov_prune.results.claim import HEADER, Kept, clear_unfinished, unfinished
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.sensitivity import measure_sensitivity

ABOUT = {"text": "a", "tokens": 5}


def claim(folder: Path, kind: str = "jobs", about: Any = ABOUT) -> Kept:
    return Kept(folder, kind, about)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# Every function that keeps its work in a folder.

GRID: dict[str, Any] = {"sparsities": (0.0, 0.5), "ranks": (None,), "cache_radii": (0.0,)}
WORK: dict[str, Callable[..., Any]] = {
    "check": lambda model, ids, **kept: check_grid(model, ids, **GRID, **kept),
    "sensitivity": lambda model, ids, **kept: measure_sensitivity(model, ids, studies=["removal"], **kept),
    "oracle": lambda model, ids, **kept: greedy_removal(model, ids, 1, **kept),
    "heal": lambda model, ids, **kept: heal(model, make_tiny("llama", seed=1), ids.repeat(3, 1), steps=1, **kept),
}


@pytest.fixture(params=WORK)
def work(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WORK[request.param]


def test_what_others_put_beside_stays(work: Callable[..., Any], ids: torch.Tensor, tmp_path: Path) -> None:
    for name in ("0.jsonl", "notes.jsonl", "step-0/log.jsonl", HEADER):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"mine": 1}\n')
    mine = contents(tmp_path)
    for text in (ids, ids.flip(1)):
        work(make_tiny("llama"), text, folder=tmp_path)
        assert mine.items() <= contents(tmp_path).items()


def test_what_was_finished_is_there_after_work_on_something_else(
    work: Callable[..., Any], ids: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was deleted, with a word on stderr."""
    model = make_tiny("llama")
    work(model, ids, folder=tmp_path)
    before = contents(tmp_path)
    work(model, ids.flip(1), folder=tmp_path)
    assert before.items() <= contents(tmp_path).items()
    assert "delete" not in capsys.readouterr().err


def both_killed(folder: Path, run: Callable[[Path, int], Any]) -> list[int | None]:
    """Two runs of different text begin in one folder, and are killed where they have kept something."""
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=run, args=(folder, which)) for which in range(2)]
    for process in runs:
        process.start()
    for process in runs:
        process.join(60)
    return [process.exitcode for process in runs]


@pytest.mark.parametrize("name", ["check", "sensitivity", "oracle"])
@pytest.mark.parametrize("same", [True, False])
def test_two_runs_at_work_in_one_folder_keep_their_own_results(
    name: str, same: bool, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts = make_tiny("llama"), (ids, ids if same else ids.flip(1))
    add = Store.add

    def killed(self: Store, key: str, value: Any) -> None:
        add(self, key, value)
        if len(self.items()) >= 2:  # what the other has kept counts too
            (tmp_path / f"{os.getpid()}.end").touch()
            end = time.monotonic() + 50
            while len(list(tmp_path.glob("*.end"))) < 2 and time.monotonic() < end:  # both have done what they do
                time.sleep(0.01)
            os._exit(9)

    def run(folder: Path, which: int) -> None:
        WORK[name](model, texts[which], folder=folder)

    monkeypatch.setattr(Store, "add", killed)
    assert sorted(both_killed(tmp_path / "run", run)) == [9, 9]
    monkeypatch.undo()
    for text in texts:
        found = WORK[name](model, text, folder=tmp_path / "run")
        pd.testing.assert_frame_equal(
            *(f.to_frame().drop(columns="forwards", errors="ignore") for f in (found, WORK[name](model, text)))
        )


# One owner.


def test_one_run_at_a_time_on_one_question(tmp_path: Path) -> None:
    with claim(tmp_path) as first:
        first.hold()
        with pytest.raises(LyapunovPruneError, match="another run is at work") as raised:
            claim(tmp_path)
        assert "\n" not in str(raised.value)
        with claim(tmp_path, about={"text": "b"}) as second:
            second.hold()
    claim(tmp_path).close()


def hold(folder: Path) -> None:
    one = claim(folder)
    one.hold()
    (folder / "held").touch()
    time.sleep(60)


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path,))
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(LyapunovPruneError, match="another run is at work"):
        claim(tmp_path)
    process.kill()
    process.join()
    claim(tmp_path).close()


# What is whose.


def test_the_place_is_that_of_kind_and_subject(tmp_path: Path) -> None:
    places = [
        claim(tmp_path, *what).place
        for what in (
            ("jobs", ABOUT),
            ("other", ABOUT),
            ("jobs", {**ABOUT, "tokens": 6}),
            ("jobs", {"tokens": (5, None), "text": "a"}),
        )
    ]
    assert len(set(places)) == 4
    with claim(tmp_path, "more") as one:
        place = one.place
    assert claim(tmp_path, "more", {"tokens": 5, "text": "a"}).place == place


def test_what_is_kept_says_what_it_is_and_goes_when_cleared_but_nothing_else(tmp_path: Path) -> None:
    with claim(tmp_path) as one:
        one.hold()
        (one.place / "state").write_bytes(b"x" * 1000)
    (tmp_path / "notes").touch()
    assert json.loads((one.place / HEADER).read_text()).items() >= {"kind": "jobs", "about": ABOUT}.items()
    (found,) = unfinished(tmp_path)
    assert (found.kind, found.folder) == ("jobs", one.place)
    assert 1000 < found.size < 3000
    with claim(tmp_path), pytest.raises(LyapunovPruneError, match="another run is at work"):
        clear_unfinished(tmp_path)
    clear_unfinished(tmp_path)
    assert list(contents(tmp_path)) == ["notes"]


def test_a_place_without_work_goes_and_others_files_stay(tmp_path: Path) -> None:
    for name in ("empty", "with notes"):
        with claim(tmp_path / name) as one:
            if name == "with notes":
                (tmp_path / name / "notes").touch()
            one.hold()
            one.forget()
        with claim(tmp_path / name):
            pass
    assert list(contents(tmp_path)) == ["with notes/notes"]
    assert not (tmp_path / "empty").exists()


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LyapunovPruneError, match="cannot write in"):
        claim(tmp_path / "file" / "x")


# The file of the lock.


def test_no_lock_file_stays_after_work_has_ended(work: Callable[..., Any], ids: torch.Tensor, tmp_path: Path) -> None:
    for _ in range(2):
        work(make_tiny("llama"), ids, folder=tmp_path)
        assert [name for name in contents(tmp_path) if name.endswith(".lock")] == []


def take_turns(folder: Path) -> None:
    """Hold the folder 100 times; a second holder at the same time finds `inside` there."""
    held = 0
    while held < 100:
        try:
            one = claim(folder)
        except LyapunovPruneError:
            continue
        (folder / "inside").touch(exist_ok=False)
        (folder / "inside").unlink()
        held += 1
        one.close()


def test_deleting_the_lock_file_lets_no_two_runs_in(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=take_turns, args=(tmp_path,)) for _ in range(4)]
    for process in runs:
        process.start()
    for process in runs:
        process.join(60)
    assert [process.exitcode for process in runs] == [0, 0, 0, 0]
