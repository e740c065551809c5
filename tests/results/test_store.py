"""Finished jobs survive whatever ends the process; nothing foreign or damaged is taken for one."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
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
        store._claim.hold()
        for key in keys:
            store.add(key, value_of(key))
    return (folder / "0.jsonl").read_bytes() if keys else b""


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


def test_planted_fault_a_line_that_waits_in_a_buffer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[Path, Any] = {}

    def late(self: Store, key: str, value: Any) -> None:
        assert self._file is not None
        files.setdefault(self._file, self._file.open("a")).write(key)
        time.sleep(0.001)

    filled(tmp_path / "x", [])
    monkeypatch.setattr(Store, "add", late)
    began = next(began for _, began in lives(tmp_path / "x", 0) if len(began) > 1)
    monkeypatch.undo()
    assert not kept(tmp_path / "x") >= set(began[:-1])


def test_a_line_torn_anywhere_costs_that_job_alone(tmp_path: Path) -> None:
    whole = filled(tmp_path, JOBS[:2])
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        (tmp_path / "0.jsonl").write_bytes(whole[:length])
        with Store(tmp_path, "jobs", ABOUT) as store:
            lines = sum(end <= length for end in ends)
            assert set(store.items()) == set(JOBS[:lines])
            for key in JOBS[:2]:
                if key not in store:
                    store.add(key, value_of(key))
        assert (tmp_path / "0.jsonl").read_bytes() == whole


# Refused.


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({**ABOUT, "tokens": 6}, "another tokens (5)"),
        ({**ABOUT, "dtype": "float32"}, "another dtype (None)"),
        ({"text": "a"}, "something else"),
    ],
)
def test_what_was_measured_on_something_else_is_deleted_which_one_line_says(
    other: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path, JOBS[:2])
    with Store(tmp_path, "jobs", other) as store:
        assert store.replaced
        assert store.items() == {}
        store.add("mine", 1)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    with Store(tmp_path, "jobs", other) as store:
        assert (store.items(), store.replaced) == ({"mine": 1}, False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "damage",
    [b"{}\n", b"[]\n", b"null\n", b'{"about": ', b'"key"', b"\x00\x00\n", b'{"key": 1}\n', b"\xff\n"],
    ids=repr,
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: bytes) -> None:
    head, *rows = filled(tmp_path, JOBS[:2]).splitlines(keepends=True)
    for content in (damage + b"\n", head + damage + b"".join(rows)):
        (tmp_path / "0.jsonl").write_bytes(content)
        with pytest.raises(LyapunovPruneError, match=r"0\.jsonl is damaged") as raised:
            Store(tmp_path, "jobs", ABOUT)
        assert "\n" not in str(raised.value)
        assert (tmp_path / "0.jsonl").read_bytes() == content


def test_a_value_that_is_no_strict_json_is_not_written(tmp_path: Path) -> None:
    before = filled(tmp_path, JOBS[:2])
    with pytest.raises(ValueError, match="JSON"):
        Store(tmp_path, "jobs", ABOUT).add("x", float("nan"))
    assert (tmp_path / "0.jsonl").read_bytes() == before


# A full disk.


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, JOBS[:2])
    store = Store(tmp_path, "jobs", ABOUT)
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(LyapunovPruneError, match=r"0\.jsonl: No space left"):
        store.add(JOBS[2], value_of(JOBS[2]))


@pytest.mark.parametrize("room", range(0, 90, 11))
def test_a_disk_that_fills_in_the_middle_of_a_line_keeps_those_before(tmp_path: Path, room: int) -> None:
    before = filled(tmp_path, JOBS[:2])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store(tmp_path, "jobs", ABOUT) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
        try:
            with pytest.raises(LyapunovPruneError, match="cannot write") as raised:
                store.add("long", "x" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(raised.value)
    assert kept(tmp_path) == set(JOBS[:2])
    assert (tmp_path / "0.jsonl").read_bytes() == before  # what was torn is gone: the next line begins on its own


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LyapunovPruneError, match=r"cannot write in"):
        Store(tmp_path / "file" / "x", "jobs", ABOUT).add("a", 1)


# Several processes.


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Be the process `rank` of `count`."""

    def be(rank: int, count: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(count))

    return be


def test_each_process_writes_its_own_file_and_reads_all(tmp_path: Path, process: Any) -> None:
    for rank in range(3):
        process(rank, 3)
        Store(tmp_path, "jobs", ABOUT).add(f"of {rank}", rank)
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    for rank, count in ((0, 1), (2, 3), (5, 6)):
        process(rank, count)
        assert Store(tmp_path, "jobs", ABOUT).items() == {"of 0": 0, "of 1": 1, "of 2": 2}


def test_another_process_s_unfinished_line_is_left_to_it(tmp_path: Path, process: Any) -> None:
    process(1, 2)
    Store(tmp_path, "jobs", ABOUT).add("a", 1)
    whole = (tmp_path / "1.jsonl").read_bytes()
    (tmp_path / "1.jsonl").write_bytes(whole + b'{"key": "b"')
    process(0, 2)
    assert kept(tmp_path) == {"a"}
    assert (tmp_path / "1.jsonl").read_bytes() == whole + b'{"key": "b"'
    process(1, 2)
    assert kept(tmp_path) == {"a"}
    assert (tmp_path / "1.jsonl").read_bytes() == whole


def test_a_fresh_start_leaves_nothing_of_former_processes(tmp_path: Path, process: Any) -> None:
    for rank in range(4):
        process(rank, 4)
        Store(tmp_path, "jobs", ABOUT).add(f"of {rank}", rank)
    process(1, 2)
    Store(tmp_path, "jobs", {"text": "b"}).close()  # leaves that to the main process
    assert len(list(tmp_path.glob("*.jsonl"))) == 4
    process(0, 2)
    Store(tmp_path, "jobs", {"text": "b"}).close()
    assert not list(tmp_path.glob("*.jsonl"))
    assert not kept(tmp_path)


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("mine\n")
    filled(tmp_path, JOBS[:2])
    assert kept(tmp_path) == set(JOBS[:2])
    assert (tmp_path / "notes.jsonl").read_text() == "mine\n"


def test_what_others_found_is_known_and_not_written(tmp_path: Path) -> None:
    before = filled(tmp_path, JOBS[:1])
    store = Store(tmp_path, "jobs", ABOUT)
    store.learn({"theirs": 1})
    assert "theirs" in store
    assert store["theirs"] == 1
    assert (tmp_path / "0.jsonl").read_bytes() == before


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
