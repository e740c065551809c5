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
    return sorted(path.name for path in folder.glob("*/*step-*"))


def save(folder: Path, step: int, about: dict[str, object] = ABOUT) -> Path:
    """The folder of the states of this training."""
    with TrainingState(folder, about) as state:
        state.save(step, tensors(step))
        assert state.place is not None
        return state.place


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


def test_without_a_folder_or_once_forgotten_there_is_none(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "mine").mkdir()
    with TrainingState(tmp_path, ABOUT) as state:
        state.forget()
    with TrainingState(tmp_path, ABOUT) as state:
        assert state.load() == {}
    assert os.listdir(tmp_path) == ["mine"]
    nowhere = TrainingState(None, ABOUT)
    nowhere.save(2, tensors(2))
    assert nowhere.load() == {}
    assert not nowhere.is_due()
    assert TrainingState(tmp_path / "absent", ABOUT).load() == {}


def test_half_a_state_is_none_and_is_cleared(tmp_path: Path) -> None:
    place = save(tmp_path, 2)
    half = place / ".step-3.partial-0123456789abcdef"
    (place / ".step-3.partial-0123456789abcdef.lock").touch()  # as a killed process leaves it
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    assert len(TrainingState(tmp_path, ABOUT).load()["losses"]) == 2
    assert states(tmp_path) == ["step-2"]


def test_two_whole_states_are_what_a_kill_between_them_leaves(tmp_path: Path) -> None:
    place, other = save(tmp_path / "a", 9), save(tmp_path / "b", 10)
    (other / "step-10").rename(place / "step-10")
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


@pytest.mark.parametrize("other", [{**ABOUT, "steps": 6}, {**ABOUT, "rank": 8}, {"text": "a", "steps": 5}], ids=repr)
def test_states_of_two_trainings_lie_beside_each_other(
    other: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The older was deleted, with a word."""
    save(tmp_path, 2)
    with TrainingState(tmp_path, other) as state:
        assert state.load() == {}
        state.save(9, tensors(9))
    for about, step in ((ABOUT, 2), (other, 9)):
        with TrainingState(tmp_path, about) as state:
            assert len(state.load()["losses"]) == step
    assert capsys.readouterr().err == ""


def test_a_state_of_another_training_is_refused(tmp_path: Path) -> None:
    place, other = save(tmp_path, 2), save(tmp_path, 9, {**ABOUT, "steps": 6})
    (other / "step-9").rename(place / "step-9")
    with pytest.raises(LyapunovPruneError, match=r"step-9/state\.safetensors is damaged or of another run"):
        TrainingState(tmp_path, ABOUT).load()


def test_a_run_in_the_folder_of_another_that_is_at_work_is_refused(tmp_path: Path) -> None:
    with TrainingState(tmp_path, ABOUT) as state:
        state.hold()
        with pytest.raises(LyapunovPruneError, match="another run is at work"):
            TrainingState(tmp_path, ABOUT)


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "no state"])
def test_a_damaged_state_is_refused(tmp_path: Path, damage: str) -> None:
    place = save(tmp_path, 2)
    path = place / "step-2/state.safetensors"
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
