"""The state of a training run on disk: whole or not at all, and taken up again only by the same run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.files import whole_folder

SECONDS = 20.0  # between two states, and longer where writing is slow
_SHARE = 0.1  # of the time, at most, goes into writing
_NAME = "state.safetensors"


class TrainingState:
    """The newest state in `folder/step-<n>/`; nothing at all when `folder` is None.

    `about` says which run it is of. A state is written beside the last one and renamed, so a kill at any moment
    leaves one that is whole. Without `resume` the states of an earlier run are deleted.

    Raises LyapunovPruneError when the disk refuses.
    """

    def __init__(self, folder: str | Path | None, about: Mapping[str, Any], *, resume: bool = False) -> None:
        self._folder = None if folder is None else Path(folder)
        self._about = json.loads(json.dumps(about))
        self._due = time.monotonic() + SECONDS
        if self._folder is not None:
            for path in [*self._folder.glob(".step-*.partial-*"), *([] if resume else self._states())]:
                shutil.rmtree(path, ignore_errors=True)

    def load(self) -> dict[str, torch.Tensor]:
        """The tensors of the newest state, on the CPU; none when there is no state.

        Raises LyapunovPruneError for a damaged state and for one of another run.
        """
        states = self._states()
        if not states:
            return {}
        path = states[-1] / _NAME
        try:
            with safe_open(path, framework="pt") as file:
                told = json.loads(file.metadata()["about"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            raise LyapunovPruneError(f"{path} is damaged; run without --resume") from None
        if told != self._about:
            what = next((key for key in self._about if told.get(key) != self._about[key]), "run")
            raise LyapunovPruneError(
                f"{self._folder} is of another {what} ({str(told.get(what))[:60]}); run without --resume"
            )
        return tensors

    def is_due(self) -> bool:
        """Whether a state should be written now."""
        return self._folder is not None and time.monotonic() >= self._due

    def save(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the state after `step` steps, then delete those before."""
        if self._folder is None:
            return
        began = time.monotonic()
        before = self._states()
        target = self._folder / f"step-{step}"
        if target in before:
            return
        with whole_folder(target) as partial:
            held = {name: t.detach().contiguous() for name, t in tensors.items()}
            save_file(held, partial / _NAME, metadata={"about": json.dumps(self._about)})
        for path in before:
            shutil.rmtree(path, ignore_errors=True)
        now = time.monotonic()
        self._due = now + max(SECONDS, (now - began) / _SHARE)

    def _states(self) -> list[Path]:
        """Oldest first."""
        found = [] if self._folder is None else [p for p in self._folder.glob("step-*") if p.name[5:].isdecimal()]
        return sorted(found, key=lambda path: int(path.name[5:]))
