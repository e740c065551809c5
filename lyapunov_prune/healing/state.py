"""The training state on disk: written whole or not at all, and continued only by the same run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.claim import Claim, Claimed
from lyapunov_prune.results.files import RETRY, halves, whole_folder

SECONDS = 20.0  # least time between two states
_SHARE = 0.1  # largest share of the time spent on writing
_NAME = "state.safetensors"
_KIND, _PART = "training state", "state"
# The remedy when a state exists but no more could be written.
KEPT = "free space and run again: the training so far is kept"


class TrainingState(Claimed):
    """The newest state in `folder/step-<n>/`; does nothing when `folder` is None.

    `about` identifies the run. A state is written next to the last one and renamed, so that a kill always leaves a
    whole one. The folder is claimed (`claim.py`) by `hold` or with the first state. The states of another run are
    deleted, which a line on stderr says; with `about` None all are deleted without a word. `close`, or the end of a
    `with` block, releases the folder.

    Raises LyapunovPruneError when the folder is not for training or another run is at work in it, or when the disk
    refuses.
    """

    def __init__(self, folder: str | Path | None, about: Mapping[str, Any] | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._due = time.monotonic() + SECONDS
        if self._folder is None:
            return
        self._take(Claim(self._folder, _KIND, about, _PART), self._begin)

    def hold(self) -> None:
        """Claim the folder for this run."""
        if self._claim is not None:
            self._claim.hold()

    def load(self) -> dict[str, torch.Tensor]:
        """The tensors of the newest state, on the CPU; empty when there is none.

        Raises LyapunovPruneError for a damaged state and for one of another run.
        """
        states = self._states()
        return {} if self._claim is None or not states else self._claim.own(states[-1] / _NAME, _read)

    def is_due(self) -> bool:
        """Whether to write a state now."""
        return self._folder is not None and time.monotonic() >= self._due

    def save(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the state after `step` steps, then delete the earlier ones."""
        if self._folder is None or self._claim is None:
            return
        began = time.monotonic()
        self.hold()
        before = self._states()
        target = self._folder / f"step-{step}"
        if target in before:
            return
        with whole_folder(target, KEPT if before else RETRY) as partial:
            held = {name: t.detach().contiguous() for name, t in tensors.items()}
            save_file(held, partial / _NAME, metadata={"origin": self._claim.origin})
        _delete(before)
        now = time.monotonic()
        self._due = now + max(SECONDS, (now - began) / _SHARE)

    def _begin(self, claim: Claim) -> None:
        same = claim.begin(self._states)
        if not (same or claim.other):
            return
        if not same:
            states = self._states()
            for path in states:
                if more := sorted({p.name for p in path.iterdir()} - {_NAME}):
                    raise LyapunovPruneError(f"{path} holds {more[0]}, which is not part of a state; move it away")
            _delete(states)
            claim.give_up()
            claim.say_replaced()
        left = halves(claim.folder, "step-[0-9]+")
        _delete(path for path in left if path.is_dir())
        for lock in left:
            if lock.suffix == ".lock":
                lock.unlink(missing_ok=True)

    def _states(self) -> list[Path]:
        """States, oldest first."""
        folders = [] if self._folder is None else [p for p in self._folder.glob("step-*") if p.is_dir()]
        states = [path for path in folders if re.fullmatch("step-(0|[1-9][0-9]*)", path.name)]
        return sorted(states, key=lambda path: int(path.name[5:]))


def clear_states(folder: Path) -> None:
    """Delete the states in `folder`, of any run. Raises like TrainingState."""
    TrainingState(folder, None).close()


def require_idle(folder: Path) -> None:
    """Raise LyapunovPruneError if a training is at work in `folder`, or the folder is for something else."""
    Claim(folder, _KIND, None, _PART).require_idle()


def _read(path: Path) -> tuple[set[str], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        return {file.metadata()["origin"]}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _delete(states: Iterable[Path]) -> None:
    for path in states:
        (path / _NAME).unlink(missing_ok=True)
        with suppress(OSError):  # other files stay
            path.rmdir()
