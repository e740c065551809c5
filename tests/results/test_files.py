"""Files and folders appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from filelock import FileLock, Timeout
from helpers import disk_full
from safetensors import SafetensorError
from safetensors.torch import save_file

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.files import (
    folder_digest,
    parsed,
    require_empty,
    require_writable,
    whole_file,
    whole_folder,
    write_whole,
)

# One file.


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "a/b.json", "ρ\n")
    assert path.read_text(encoding="utf-8") == "ρ\n"
    assert os.listdir(path.parent) == ["b.json"]


def test_a_large_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "x.bin"

    def half() -> None:
        with whole_file(target) as path:
            path.write_bytes(b"half")
            disk_full()

    with pytest.raises(LyapunovPruneError, match="nothing of this run"):
        half()
    assert os.listdir(tmp_path) == []
    with whole_file(target) as path:
        path.write_bytes(b"whole")
        assert not target.exists()
    assert (target.read_bytes(), os.listdir(tmp_path)) == (b"whole", ["x.bin"])
    with pytest.raises(LyapunovPruneError, match="exists"), whole_file(target):
        pytest.fail("opened")


def test_a_large_file_does_not_replace_one_that_came_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "x.bin"

    def both() -> None:
        with whole_file(target) as path:
            path.write_bytes(b"mine")
            target.write_bytes(b"theirs")

    with pytest.raises(LyapunovPruneError, match="exists"):
        both()
    assert target.read_bytes() == b"theirs"


def test_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    assert write_whole(tmp_path / "x", "new").read_text() == "new"


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(LyapunovPruneError, match="No space left"):
        write_whole(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_an_interrupted_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "x", "new")
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_is_needed_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LyapunovPruneError, match=r"cannot write .*file/x"):
        write_whole(tmp_path / "file/x", "new")


# One folder.


def fill(target: Path, error: BaseException | None = None) -> None:
    """Write one file into a whole folder, and fail after it if told to."""
    with whole_folder(target) as folder:
        (folder / "x").write_text("1")
        if error is not None:
            raise error


def test_a_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep/target"
    with whole_folder(target) as folder:
        (folder / "x").write_text("1")
        assert not target.exists()
    assert (target / "x").read_text() == "1"
    assert os.listdir(target.parent) == ["target"]
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), LyapunovPruneError),
        (SafetensorError("I/O error: No space left on device"), LyapunovPruneError),
        (RuntimeError("a bug"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_nothing_is_left_when_the_block_fails(
    tmp_path: Path, error: BaseException, raised: type[BaseException]
) -> None:
    with pytest.raises(raised):
        fill(tmp_path / "target", error)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="No space left"):
        fill(tmp_path / "target", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    fill(tmp_path / "target")
    assert os.listdir(tmp_path / "target") == ["x"]


def test_the_current_folder_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    fill(Path("."))
    assert os.listdir(tmp_path / "here") == ["x"]


def test_a_link_to_an_empty_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fill(tmp_path / "link")
    assert os.listdir(tmp_path / "real") == ["x"]


def test_what_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(LyapunovPruneError, match="meanwhile"), whole_folder(target):
        write_whole(target / "theirs", "1")
    assert os.listdir(target) == ["theirs"]
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_was_there_before_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    there = target / "x" if kind == "folder" else target
    there.parent.mkdir(exist_ok=True)
    there.write_text("mine")
    with pytest.raises(LyapunovPruneError, match=r"is (not empty|a file)"), whole_folder(target):
        pytest.fail("the block ran")
    assert there.read_text() == "mine"


def test_an_absent_or_empty_target_is_accepted(tmp_path: Path) -> None:
    require_empty(tmp_path)
    require_empty(tmp_path / "absent")


# Who may read it.


@pytest.fixture(params=[0o022, 0o077, 0o002, 0o000], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_has_the_permissions_that_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    path = write_whole(tmp_path / "sub/x", "1")
    assert mode(path) == 0o666 & ~umask
    assert mode(path.parent) == 0o777 & ~umask


def test_all_of_a_folder_has_the_permissions_that_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    with whole_folder(tmp_path / "target") as folder:
        (folder / "x").write_text("1")
        save_file({"a": torch.zeros(1)}, folder / "x.safetensors")  # the owner's alone, as safetensors writes it
        (folder / "sub").mkdir()
        save_file({"a": torch.zeros(1)}, folder / "sub/x.safetensors")
    assert mode(tmp_path / "target") == mode(tmp_path / "target/sub") == 0o777 & ~umask
    for file in ("x", "x.safetensors", "sub/x.safetensors"):
        assert mode(tmp_path / "target" / file) == 0o666 & ~umask, file


# What is in one.


def test_the_fingerprint_of_a_folder_is_that_of_all_in_it(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    (tmp_path / "a/below").mkdir()
    seen = {folder_digest(tmp_path / "a")}
    x, y, new = tmp_path / "b/x", tmp_path / "b/below/y", tmp_path / "b/new"
    (tmp_path / "a").rename(tmp_path / "b")
    assert seen == {folder_digest(tmp_path / "b")}
    changes: list[Callable[[], object]] = [
        lambda: x.write_text("12"),
        lambda: os.utime(x, ns=(0, 5)),  # written again, the same
        lambda: y.write_text(""),
        lambda: os.utime(y, ns=(0, 7)),
        lambda: x.rename(new),
        x.mkdir,
    ]
    for number, change in enumerate(changes, 2):
        change()
        seen.add(folder_digest(tmp_path / "b"))
        assert len(seen) == number


# Disks, mount points and what was killed.


def test_what_is_renamed_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        order.append(f"to {Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_whole(tmp_path / "file", "1")
    assert order[0].startswith(".file.")
    assert order[1:] == ["to file", tmp_path.name]
    order.clear()
    fill(tmp_path / "folder")
    assert order[0] == "x"
    assert order[1].startswith(".folder.partial-")
    assert order[2:] == ["to folder", tmp_path.name]


def busy(*args: object) -> NoReturn:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def test_a_mount_point_is_filled_config_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, order = tmp_path / "volume", list[str]()
    target.mkdir()
    number = target.stat().st_ino
    monkeypatch.setattr(Path, "rmdir", busy)
    move = shutil.move
    monkeypatch.setattr(shutil, "move", lambda a, b: order.append(a.name) or move(a, b))
    with whole_folder(target) as folder:
        for name in ("config.json", "model.safetensors", "a"):
            (folder / name).write_text(name)
    assert {path.name: path.read_text() for path in target.iterdir()} == {name: name for name in order}
    assert sorted(order) == ["a", "config.json", "model.safetensors"]
    assert (order[-1], target.stat().st_ino) == ("config.json", number)
    assert os.listdir(tmp_path) == ["volume"]


def test_a_mount_point_that_fills_up_is_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", busy)
    monkeypatch.setattr(shutil, "move", disk_full)
    with pytest.raises(LyapunovPruneError, match="No space left"):
        fill(tmp_path / "volume")
    assert list((tmp_path / "volume").iterdir()) == []


def test_a_full_disk_as_tokenizers_tells_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"\(os error 28\)"):
        fill(tmp_path / "target", Exception("No space left on device (os error 28)"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.EFBIG, "File too large"), Exception("File too large (os error 27)")])
def test_a_file_larger_than_can_be_is_not_told_to_free_space(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="no file so large"):
        fill(tmp_path / "target", error)
    assert os.listdir(tmp_path) == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from lyapunov_prune.results.files import whole_folder
with whole_folder(sys.argv[1]) as folder:
    (folder / "x").write_text("1")
    if len(sys.argv) > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    print(folder.name, flush=True)
    sys.stdin.read()
"""


def test_the_next_run_removes_what_killed_ones_left(tmp_path: Path) -> None:
    """And nothing of one that lives, of another target, or of a version without locks."""
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "target")]
    other = tmp_path / f".targets.partial-{'0' * 16}"
    old = tmp_path / f".target.partial-{'0' * 16}"
    for folder in (other, old):
        folder.mkdir()
    living = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert living.stdout is not None
    name = living.stdout.readline().strip()
    assert subprocess.run([*command, "kill"], check=False).returncode == -9
    assert len(list(tmp_path.glob(".target.partial-*[0-9a-f]"))) == 3
    fill(tmp_path / "target")
    assert {path.name for path in tmp_path.iterdir()} == {"target", name, f"{name}.lock", other.name, old.name}
    living.communicate()
    assert {path.name for path in tmp_path.iterdir()} == {"target", other.name, old.name}


# What cannot be written to is refused before work.


@pytest.mark.parametrize("name", ["x" * 300, "x" * 240, "\udcff", "a\0b", "loop", "file/x", "x" * 5000])
def test_a_folder_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(LyapunovPruneError, match=r"; (choose another|give another) output"):
        require_empty(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"loop", "file"}


def test_a_lock_that_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: FileLock) -> None:
        raise Timeout(self.lock_file)  # an OSError without strerror

    monkeypatch.setattr(FileLock, "acquire", refused)
    told = r"cannot write beside .*file lock"
    with pytest.raises(LyapunovPruneError, match=told), whole_folder(tmp_path / "out"):
        pass


@pytest.mark.parametrize("name", ["loop", "file", "file/x", "x" * 300, "a\0b"])
def test_a_run_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(LyapunovPruneError, match=r"cannot write in .*output"):
        require_writable(tmp_path / name)


def test_another_s_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(LyapunovPruneError, match="not yours"):
        require_writable(tmp_path / "new" / "run")


def test_json_without_end_is_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parsed("[" * 100_000)


@pytest.mark.parametrize("mask", [0o777, 0o700, 0o400])
def test_a_umask_that_keeps_the_owner_out_is_refused(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        for write in (fill, lambda path: write_whole(path, "x"), require_writable):
            with pytest.raises(LyapunovPruneError, match=f"umask is {mask:o}"):
                write(tmp_path / "target")
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == []
