"""The report of `export` on the file or folder that it wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.models.structure import model_name
from lyapunov_prune.pruning.gate import GateReport
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import Result


@dataclass(frozen=True)
class Exported(Result):
    """A model written in another `format`, and the checks that what was written passed.

    `stored` counts the tensors of each storage type; `size` is the size of all tensors in bytes; `not_run` names the
    checks that were not made.
    """

    source: str
    format: str
    stored: dict[str, int]
    size: int
    checks: tuple[GateCheck, ...]
    not_run: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        return GateReport(self.checks).to_frame()

    def headline(self) -> str:
        stored = ", ".join(f"{count} {kind}" for kind, count in self.stored.items())
        return f"{self.source} as {self.format}: tensors {stored}; {self.size / 1e6:.1f} MB"

    def answer(self) -> list[str]:
        left = f" Not run: {', '.join(self.not_run)}." if self.not_run else ""
        return [f"{self.headline()}.", f"Checks passed: {len(self.checks)}.{left}"]


def exported(
    format: str, model: PreTrainedModel, written: Collection[torch.Tensor], checks: tuple[GateCheck, ...]
) -> Exported:
    """The report on `model`, of which the tensors `written` are stored in their own dtypes; each is counted once."""
    tensors = {tensor.data_ptr(): tensor for tensor in written}.values()
    stored = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return Exported(model_name(model), format, dict(stored), sum(tensor.nbytes for tensor in tensors), checks)
