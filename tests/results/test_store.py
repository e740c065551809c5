"""Finished jobs survive whatever ends the process; nothing foreign or damaged is taken for one."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers import disk_full

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.store import Store

ABOUT = {"text": "a", "tokens": 5}
JOBS = [f"job {i}" for i in range(50)]


def value_of(key: str) -> dict[str, Any]:
    return {"windows": [len(key) + 0.1, "nan"], "drift": 1e-300}


def filled(folder: Path, keys: list[str]) -> bytes:
    """The bytes of a store of `keys`."""
    with Store(folder, "jobs", ABOUT) as store:
        store.hold()
        for key in keys:
            store.add(key, value_of(key))
    return file_of(folder).read_bytes() if keys else b""


def file_of(folder: Path) -> Path:
    """The only file of jobs there."""
    (path,) = folder.glob("*/*.jsonl")
    return path


def kept(folder: Path) -> set[str]:
    return set(Store(folder, "jobs", ABOUT).items())


# Killed.


def work(folder: Path, log: int) -> None:
    """What a process does: every job that is not done, one after the other, told to `log` as it begins."""
    store = Store(folder, "jobs", ABOUT)
    for key in JOBS:
        if key not in store:
            os.write(log, f"{key}\n".encode())
            store.add(key, value_of(key))


def lives(folder: Path, seed: int) -> Iterator[tuple[set[str], list[str]]]:
    """Work until all is done, killed at random moments: of every life, what was done before it and what it began."""
    log = os.open(folder.with_suffix(".log"), os.O_RDWR | os.O_CREAT)
    context, dice = multiprocessing.get_context("fork"), random.Random(seed)
    while True:
        before, told = kept(folder), os.lseek(log, 0, os.SEEK_END)
        child = context.Process(target=work, args=(folder, log))
        child.start()
        while os.lseek(log, 0, os.SEEK_END) == told and child.is_alive():
            time.sleep(0.0005)
        child.join(dice.uniform(0, 0.003))
        child.kill()
        child.join()
        yield before, os.pread(log, 1 << 20, told).decode().splitlines()
        if child.exitcode == 0:
            os.close(log)
            return


def test_a_kill_loses_at_most_the_job_in_flight(tmp_path: Path) -> None:
    kills = 0
    for seed in range(2):
        for before, began in lives(tmp_path / str(seed), seed):
            after = kept(tmp_path / str(seed))
            assert not set(began) & before  # nothing done twice
            assert after >= before | set(began[:-1])
            kills += 1
        assert Store(tmp_path / str(seed), "jobs", ABOUT).items() == {key: value_of(key) for key in JOBS}
    assert kills > 2


def test_a_line_torn_anywhere_costs_that_job_alone(tmp_path: Path) -> None:
    whole = filled(tmp_path, JOBS[:2])
    torn = file_of(tmp_path)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        shutil.rmtree(torn.parent)
        torn.parent.mkdir()
        torn.write_bytes(whole[:length])
        with Store(tmp_path, "jobs", ABOUT) as store:
            lines = sum(end <= length for end in ends)
            assert set(store.items()) == set(JOBS[:lines])
            for key in JOBS[:2]:
                if key not in store:
                    store.add(key, value_of(key))
        assert kept(tmp_path) == set(JOBS[:2])


# Refused.


@pytest.mark.parametrize("other", [{**ABOUT, "tokens": 6}, {**ABOUT, "dtype": "float32"}, {"text": "a"}], ids=repr)
def test_what_was_measured_on_something_else_lies_beside(
    other: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was deleted, with a word on stderr."""
    filled(tmp_path, JOBS[:2])
    with Store(tmp_path, "jobs", other) as store:
        assert store.items() == {}
        store.add("mine", 1)
    assert Store(tmp_path, "jobs", other).items() == {"mine": 1}
    assert kept(tmp_path) == set(JOBS[:2])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "damage",
    [b"{}\n", b"[]\n", b"null\n", b'{"about": ', b'"key"', b"\x00\x00\n", b'{"key": 1}\n', b"\xff\n"],
    ids=repr,
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: bytes) -> None:
    head, *rows = filled(tmp_path, JOBS[:2]).splitlines(keepends=True)
    file = file_of(tmp_path)
    for content in (damage + b"\n", head + damage + b"".join(rows)):
        file.write_bytes(content)
        with pytest.raises(LyapunovPruneError, match=r"\.jsonl is damaged") as raised:
            Store(tmp_path, "jobs", ABOUT)
        assert "\n" not in str(raised.value)
        assert file.read_bytes() == content


def test_a_value_that_is_no_strict_json_is_not_written(tmp_path: Path) -> None:
    before = filled(tmp_path, JOBS[:2])
    with pytest.raises(ValueError, match="JSON"):
        Store(tmp_path, "jobs", ABOUT).add("x", float("nan"))
    assert file_of(tmp_path).read_bytes() == before


# A full disk.


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, JOBS[:2])
    store = Store(tmp_path, "jobs", ABOUT)
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(LyapunovPruneError, match=r"\.jsonl: No space left"):
        store.add(JOBS[2], value_of(JOBS[2]))


@pytest.mark.parametrize("room", range(0, 90, 11))
def test_a_disk_that_fills_in_the_middle_of_a_line_keeps_those_before_and_after(tmp_path: Path, room: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store(tmp_path, "jobs", ABOUT) as store:
        store.add(JOBS[0], 1)
        before = file_of(tmp_path).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (before + room, limits[1]))
        try:
            with pytest.raises(LyapunovPruneError, match="cannot write") as raised:
                store.add("long", "x" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        store.add(JOBS[1], 1)
    assert "\n" not in str(raised.value)
    assert kept(tmp_path) == set(JOBS[:2])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LyapunovPruneError, match="cannot write"):
        Store(tmp_path / "file" / "x", "jobs", ABOUT).add("a", 1)


# Several processes.


def test_each_run_writes_its_own_file_and_reads_all(tmp_path: Path) -> None:
    stores = [Store(tmp_path, "jobs", ABOUT) for _ in range(3)]
    for number, store in enumerate(stores):
        store.add(f"of {number}", number)
    assert len(list(tmp_path.glob("*/*.jsonl"))) == 3
    assert Store(tmp_path, "jobs", ABOUT).items() == {"of 0": 0, "of 1": 1, "of 2": 2}


def test_another_run_s_unfinished_line_is_left_to_it(tmp_path: Path) -> None:
    whole = filled(tmp_path, JOBS[:1])
    file_of(tmp_path).write_bytes(whole + b'{"key": "b"')
    with Store(tmp_path, "jobs", ABOUT) as store:
        store.add("mine", 1)
    assert kept(tmp_path) == {JOBS[0], "mine"}
    assert whole + b'{"key": "b"' in {path.read_bytes() for path in tmp_path.glob("*/*.jsonl")}


def test_what_others_found_is_known_and_not_written(tmp_path: Path) -> None:
    before = filled(tmp_path, JOBS[:1])
    store = Store(tmp_path, "jobs", ABOUT)
    store.learn({"theirs": 1})
    assert "theirs" in store
    assert store["theirs"] == 1
    assert file_of(tmp_path).read_bytes() == before


# Elsewhere.


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("the disk was touched")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "open", touched)
    store = Store(None, "jobs", ABOUT)
    store.add("a", 1)
    assert store.items() == {"a": 1}
    assert "a" in store
    assert "b" not in store
    assert not list(tmp_path.iterdir())


def test_no_folder_appears_before_the_first_job(tmp_path: Path) -> None:
    Store(tmp_path / "x", "jobs", ABOUT)
    Store(tmp_path / "x", "jobs", ABOUT)
    assert not (tmp_path / "x").exists()


def test_what_is_measured_on_is_compared_as_json_keeps_it(tmp_path: Path) -> None:
    Store(tmp_path, "jobs", {"layers": (1, 2), "none": None}).add("a", 1)
    assert "a" in Store(tmp_path, "jobs", {"none": None, "layers": [1, 2]})
