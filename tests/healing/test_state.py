"""A state of a run comes back as it was; nothing foreign, damaged or half-written is taken for one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers import disk_full

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.healing import state as module
from lyapunov_prune.healing.state import TrainingState

ABOUT = {"text": "a", "steps": 5, "rank": None}


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "losses": torch.rand(step, generator=generator, dtype=torch.float64),
        "parameter/w": torch.randn(3, 4, generator=generator).T,  # not contiguous
        "step/w": torch.tensor(float(step)),
    }


def states(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*step-*"))


def save(folder: Path, step: int) -> None:
    with TrainingState(folder, ABOUT) as state:
        state.save(step, tensors(step))


def test_the_newest_state_comes_back_and_the_older_go(tmp_path: Path) -> None:
    with TrainingState(tmp_path / "a", ABOUT) as state:
        for step in (2, 9, 10):
            state.save(step, tensors(step))
            assert states(tmp_path / "a") == [f"step-{step}"]
    found = TrainingState(tmp_path / "a", ABOUT).load()
    assert found.keys() == tensors(10).keys()
    for name, tensor in tensors(10).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_without_a_folder_or_after_clearing_there_is_none(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "mine").mkdir()
    module.clear_states(tmp_path)
    with TrainingState(tmp_path, ABOUT) as state:
        assert state.load() == {}
    assert os.listdir(tmp_path) == ["mine"]
    nowhere = TrainingState(None, ABOUT)
    nowhere.save(2, tensors(2))
    assert nowhere.load() == {}
    assert not nowhere.is_due()
    assert TrainingState(tmp_path / "absent", ABOUT).load() == {}


def test_half_a_state_is_none_and_is_cleared(tmp_path: Path) -> None:
    save(tmp_path, 2)
    half = tmp_path / ".step-3.partial-0123456789abcdef"
    (tmp_path / ".step-3.partial-0123456789abcdef.lock").touch()  # as a killed process leaves it
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    assert len(TrainingState(tmp_path, ABOUT).load()["losses"]) == 2
    assert states(tmp_path) == ["step-2"]


def test_two_whole_states_are_what_a_kill_between_them_leaves(tmp_path: Path) -> None:
    save(tmp_path / "a", 9)
    save(tmp_path / "b", 10)
    (tmp_path / "b/step-10").rename(tmp_path / "a/step-10")
    state = TrainingState(tmp_path / "a", ABOUT)
    assert len(state.load()["losses"]) == 10
    state.save(11, tensors(11))
    assert states(tmp_path / "a") == ["step-11"]


def test_a_disk_that_is_full_keeps_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = TrainingState(tmp_path, ABOUT)
    state.save(2, tensors(2))
    monkeypatch.setattr(module, "save_file", disk_full)
    with pytest.raises(LyapunovPruneError, match=r"No space left.*kept"):
        state.save(3, tensors(3))
    assert states(tmp_path) == ["step-2"]
    with pytest.raises(LyapunovPruneError, match=r"No space left.*retry"):
        TrainingState(tmp_path / "first", ABOUT).save(1, tensors(1))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({**ABOUT, "steps": 6}, "another steps (5)"),
        ({**ABOUT, "rank": 8}, "another rank (None)"),
        ({"text": "a", "steps": 5}, "something else"),
    ],
)
def test_a_state_of_another_run_is_deleted_which_one_line_says(
    other: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 2)
    with TrainingState(tmp_path, other) as state:
        assert state.load() == {}
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert states(tmp_path) == []


def test_a_state_of_another_run_under_this_header_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", 2)
    with TrainingState(tmp_path / "b", {**ABOUT, "steps": 6}) as state:
        state.save(9, tensors(9))
    (tmp_path / "b/step-9").rename(tmp_path / "a/step-9")
    with pytest.raises(LyapunovPruneError, match=r"step-9/state\.safetensors is damaged or of another run"):
        TrainingState(tmp_path / "a", ABOUT).load()


def test_what_lies_beside_a_state_is_not_deleted(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "step-2/notes").write_text("mine")
    with pytest.raises(LyapunovPruneError, match="step-2 holds notes"):
        module.clear_states(tmp_path)
    assert len(TrainingState(tmp_path, ABOUT).load()["losses"]) == 2
    with TrainingState(tmp_path, ABOUT) as state:
        state.save(3, tensors(3))
    assert (tmp_path / "step-2/notes").read_text() == "mine"


def test_a_run_in_the_folder_of_another_that_is_at_work_is_refused(tmp_path: Path) -> None:
    with TrainingState(tmp_path, ABOUT) as state:
        state.hold()
        with pytest.raises(LyapunovPruneError, match="another run is at work"):
            TrainingState(tmp_path, ABOUT)


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "no state"])
def test_a_damaged_state_is_refused(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 2)
    path = tmp_path / "step-2/state.safetensors"
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "no state":
        module.save_file({"a": torch.zeros(1)}, path)
    else:
        path.write_bytes(whole[:-3] if damage == "cut" else b"")
    with pytest.raises(LyapunovPruneError, match=r"state\.safetensors is damaged"):
        TrainingState(tmp_path, ABOUT).load()


def test_a_state_is_due_after_its_seconds_and_later_where_writing_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    state = TrainingState(tmp_path, ABOUT)
    now[0] = module.SECONDS - 1
    assert not state.is_due()
    now[0] = module.SECONDS
    assert state.is_due()
    save_file = module.save_file

    def slow(*args: object, **kwargs: object) -> None:
        now[0] += 5
        save_file(*args, **kwargs)

    monkeypatch.setattr(module, "save_file", slow)
    state.save(1, tensors(1))
    now[0] += 49
    assert not state.is_due()
    now[0] += 1
    assert state.is_due()
