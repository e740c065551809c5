"""A folder of unfinished work belongs to one run at a time, and nothing of anybody else is touched in it."""

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
from lyapunov_prune.results.claim import HEADER, Claim
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.sensitivity import measure_sensitivity

ABOUT = {"text": "a", "tokens": 5}


def claim(folder: Path, kind: str = "jobs", about: Any = ABOUT) -> Claim:
    return Claim(folder, kind, about, "0.jsonl")


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
    "heal": lambda model, ids, **kept: heal(model, make_tiny("llama", seed=1), ids, steps=1, **kept),
}


@pytest.fixture(params=WORK)
def work(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WORK[request.param]


def own_files(folder: Path) -> dict[str, bytes]:
    """What somebody keeps there, by names that runs use too."""
    for name in ("0.jsonl", "1.jsonl", "00002.jsonl", "step-0/log.jsonl", "step-1/0.jsonl", "step-9/weights"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"mine": 1}\n')
    return contents(folder)


@pytest.mark.parametrize("header", [None, "", "{}", '{"kind": "weights", "about": {}}'])
def test_a_folder_that_is_not_a_run_s_is_refused_and_left_as_it_is(
    work: Callable[..., Any], header: str | None, ids: torch.Tensor, tmp_path: Path
) -> None:
    own_files(tmp_path)
    if header is not None:
        (tmp_path / HEADER).write_text(header)
    before = contents(tmp_path)
    with pytest.raises(LyapunovPruneError, match="give another folder") as raised:
        work(make_tiny("llama"), ids, folder=tmp_path)
    assert "\n" not in str(raised.value)
    assert contents(tmp_path) == before


def test_what_others_put_beside_stays(work: Callable[..., Any], ids: torch.Tensor, tmp_path: Path) -> None:
    model = make_tiny("llama")
    work(model, ids, folder=tmp_path)
    mine = {"00002.jsonl", "notes.jsonl", "step-x/0.jsonl", "step-007/state.safetensors"}
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    for text in (ids, ids.flip(1)):
        work(model, text, folder=tmp_path)
        assert mine <= contents(tmp_path).keys()


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
def test_of_two_runs_in_one_folder_one_is_refused_and_the_other_s_results_are_its_own(
    name: str, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts = make_tiny("llama"), (ids, ids.flip(1))
    add = Store.add

    def killed(self: Store, key: str, value: Any) -> None:
        add(self, key, value)
        if len(self.items()) == 2:
            end(9)

    def end(code: int) -> None:
        (tmp_path / f"{os.getpid()}.end").touch()
        while len(list(tmp_path.glob("*.end"))) < 2:  # both have done what they do
            time.sleep(0.01)
        os._exit(code)

    def run(folder: Path, which: int) -> None:
        try:
            WORK[name](model, texts[which], folder=folder)
        except LyapunovPruneError:
            end(2)

    monkeypatch.setattr(Store, "add", killed)
    assert sorted(both_killed(tmp_path / "run", run)) == [2, 9]
    monkeypatch.undo()
    for text in texts:
        found = WORK[name](model, text, folder=tmp_path / "run")
        pd.testing.assert_frame_equal(
            *(f.to_frame().drop(columns="forwards", errors="ignore") for f in (found, WORK[name](model, text)))
        )


# One owner.


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first, second = claim(tmp_path / "a"), claim(tmp_path / "a", about={"text": "b"})
    assert not first.begin(list)
    assert not second.begin(list)
    assert not (tmp_path / "a").exists()
    first.hold()
    for refused in (second.hold, lambda: claim(tmp_path / "a").begin(list)):
        with pytest.raises(LyapunovPruneError, match="another run is at work") as raised:
            refused()
        assert "\n" not in str(raised.value)
    first.release()
    with pytest.raises(LyapunovPruneError, match="another run has begun in"):
        second.hold()  # it began when nobody was there
    second.release()
    assert claim(tmp_path / "a").begin(list)


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
        claim(tmp_path).begin(list)
    process.kill()
    process.join()
    assert claim(tmp_path).begin(list)


def test_processes_of_one_run_share_a_folder(tmp_path: Path) -> None:
    claims = [Claim(tmp_path, "jobs", ABOUT, f"{rank}.jsonl") for rank in range(2)]
    for one in claims:
        one.hold()
    assert claims[0].origin == claims[1].origin


def test_a_refused_run_keeps_nobody_out(tmp_path: Path) -> None:
    with Store(tmp_path, "jobs", ABOUT) as store:
        store.add("a", 1)
    with pytest.raises(LyapunovPruneError, match="of a jobs") as raised:
        Store(tmp_path, "sweep", ABOUT)
    assert Store(tmp_path, "jobs", ABOUT).items() == {"a": 1}
    assert raised.traceback  # in which that store lives on


# What is whose.


def test_the_origin_is_that_of_kind_and_subject(tmp_path: Path) -> None:
    origins = [
        claim(tmp_path, *what).origin
        for what in (
            ("jobs", ABOUT),
            ("other", ABOUT),
            ("jobs", {**ABOUT, "tokens": 6}),
            ("jobs", {"tokens": 5, **ABOUT}),
        )
    ]
    assert len(set(origins)) == 3
    assert origins[0] == origins[3]


def test_a_line_of_another_run_is_seen_under_any_header(tmp_path: Path) -> None:
    for name, text in (("a", "a"), ("b", "b")):
        with Store(tmp_path / name, "jobs", {"text": text}) as store:
            store.add(f"of {name}", 1)
    with (tmp_path / "a/0.jsonl").open("ab") as file:
        file.write((tmp_path / "b/0.jsonl").read_bytes())
    with pytest.raises(LyapunovPruneError, match=r"0\.jsonl is damaged or of another run"):
        Store(tmp_path / "a", "jobs", {"text": "a"})


def test_another_kind_of_work_is_never_cleared(tmp_path: Path) -> None:
    with Store(tmp_path, "check", ABOUT) as store:
        store.add("a", 1)
    before = contents(tmp_path)
    for about in (ABOUT, None):
        with pytest.raises(LyapunovPruneError, match="of a check"):
            Store(tmp_path, "sweep", about)
    assert contents(tmp_path) == before


def test_the_header_says_what_the_folder_is_about(tmp_path: Path) -> None:
    claim(tmp_path).hold()
    assert json.loads((tmp_path / HEADER).read_text()) == {"kind": "jobs", "about": ABOUT}


def test_a_folder_given_up_goes_and_others_files_stay(tmp_path: Path) -> None:
    for name in ("empty", "with notes"):
        one = claim(tmp_path / name)
        one.hold()
        if name == "with notes":
            (tmp_path / name / "notes").touch()
        one.give_up()
        one.release()
    assert list(contents(tmp_path)) == ["with notes/notes"]
    assert not (tmp_path / "empty").exists()


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LyapunovPruneError, match="cannot write in"):
        claim(tmp_path / "file" / "x").hold()


# The file of the lock.


def test_no_lock_file_stays_after_work_has_ended(work: Callable[..., Any], ids: torch.Tensor, tmp_path: Path) -> None:
    for _ in range(2):
        work(make_tiny("llama"), ids, folder=tmp_path)
        assert [name for name in contents(tmp_path) if name.endswith(".lock")] == []


def take_turns(folder: Path) -> None:
    """Hold the folder 100 times; a second holder at the same time finds `inside` there."""
    held = 0
    while held < 100:
        one = claim(folder)
        try:
            one.hold()
        except LyapunovPruneError:
            continue
        (folder / "inside").touch(exist_ok=False)
        (folder / "inside").unlink()
        held += 1
        one.release()


def test_deleting_the_lock_file_lets_no_two_runs_in(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=take_turns, args=(tmp_path,)) for _ in range(4)]
    for process in runs:
        process.start()
    for process in runs:
        process.join(60)
    assert [process.exitcode for process in runs] == [0, 0, 0, 0]
