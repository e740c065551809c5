"""The training state on disk: written whole or not at all, and continued only by the same run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lyapunov_prune.results.claim import Kept, readable
from lyapunov_prune.results.files import RETRY, delete, halves, whole_folder

SECONDS = 20.0  # least time between two states
_SHARE = 0.1  # largest share of the time spent on writing
_NAME = "state.safetensors"
# The remedy when a state exists but no more could be written.
KEPT = "free space and run again: the training so far is kept"


class TrainingState(Kept):
    """The newest state of a training, in `place/step-<n>/`; does nothing when `folder` is None.

    `about` is all that the training depends on (`Kept`), and one run at a time works on it. A state is written next to
    the last one and renamed, so that a kill always leaves a whole one.

    Raises LyapunovPruneError when another run is at work on the same training, or when the disk refuses.
    """

    def __init__(self, folder: str | Path | None, about: Mapping[str, Any]) -> None:
        super().__init__(folder, "training state", about)
        self._due = time.monotonic() + SECONDS
        for left in [] if self.place is None else halves(self.place, "step-[0-9]+"):  # of a run that was killed
            delete(left)

    def load(self) -> dict[str, torch.Tensor]:
        """The tensors of the newest state, on the CPU; empty when there is none.

        Raises LyapunovPruneError for a damaged state and for one of another training.
        """
        states = self._states()
        if not states:
            return {}
        path = states[-1] / _NAME
        with readable(path), safe_open(path, framework="pt") as file:
            if file.metadata()["origin"] != path.parents[1].name:
                raise ValueError("of another training")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def is_due(self) -> bool:
        """Whether to write a state now."""
        return self.place is not None and time.monotonic() >= self._due

    def save(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the state after `step` steps, then delete the earlier ones."""
        if self.place is None:
            return
        began = time.monotonic()
        self.hold()
        before = self._states()
        target = self.place / f"step-{step}"
        if target in before:
            return
        with whole_folder(target, KEPT if before else RETRY) as partial:
            held = {name: t.detach().contiguous() for name, t in tensors.items()}
            save_file(held, partial / _NAME, metadata={"origin": self.place.name})
        for earlier in before:
            delete(earlier)
        now = time.monotonic()
        self._due = now + max(SECONDS, (now - began) / _SHARE)

    def _states(self) -> list[Path]:
        """States, oldest first."""
        states = [] if self.place is None else self.place.glob("step-*")
        return sorted(states, key=lambda path: int(path.name[5:]))
