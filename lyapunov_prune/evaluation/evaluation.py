"""The result of `lyapunov-prune eval`: perplexity and zeros, optionally speed, tasks and llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from lyapunov_prune.evaluation.engine import EngineScores
from lyapunov_prune.evaluation.judging import compare
from lyapunov_prune.evaluation.perplexity import Perplexity
from lyapunov_prune.evaluation.speed import Speed
from lyapunov_prune.evaluation.task_scores import TaskScores
from lyapunov_prune.models.size import Size
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, MeasuredOn, Result
from lyapunov_prune.results.wording import between
from lyapunov_prune.results.worth import Ratio

# From this share on, the report names zeros.
SPARSE = 0.05


@dataclass(frozen=True)
class Evaluation(Result):
    """Perplexity of one model, or of two on the same tokens; speeds and tasks measured in the same run.

    `zeros` is the share of zeros among the entries of each model's layers (matrices and larger tensors). `sizes` are
    those of the files that the models were loaded from, or would be saved as; empty in files of older versions. `kl`
    (windows,) is KL(first ‖ other) in nats a token; None for one model, and where it was not measured.
    """

    perplexities: tuple[Perplexity, ...]  # the reference model first, when there is one
    zeros: tuple[float, ...]
    speed: Speed | None
    tasks: TaskScores | None = None
    engine: EngineScores | None = None
    sizes: tuple[Size, ...] = ()
    kl: np.ndarray | None = None

    @property
    def measured_on(self) -> tuple[MeasuredOn, ...]:
        """One entry per model, in the order of `perplexities`."""
        return tuple(perplexity.measured_on for perplexity in self.perplexities)

    def to_frame(self) -> pd.DataFrame:
        rows: list[dict[str, Any]] = []
        names = [on.model.name for on in self.measured_on]
        if len(set(names)) < len(names):  # one was made in memory from the other
            names = [names[0], *(f"{name}, changed" for name in names[1:])]
        for number, (perplexity, zeros) in enumerate(zip(self.perplexities, self.zeros, strict=True)):
            ratio, low, high = perplexity.ratio_to(self.perplexities[0])
            rows.append(
                {
                    "model": names[number],
                    "perplexity": perplexity.value,
                    "× first": ratio,
                    "low": low,
                    "high": high,
                    "layers": perplexity.measured_on.model.num_layers,
                    "parameters": perplexity.measured_on.model.parameters,
                    "zeros": zeros,
                }
            )
            if self.sizes:
                rows[-1] |= {"MB": self.sizes[number].bytes / 1e6, "bits a weight": self.sizes[number].bits}
            if self.kl is not None:
                rows[-1] |= {"KL": float(self.kl.mean()) if number else 0.0}
        frame = pd.DataFrame(rows)
        return frame if len(rows) > 1 else frame.drop(columns=["× first", "low", "high"])

    def against_dense(self) -> Ratio | None:
        reference, *others = self.perplexities
        return others[-1].ratio_to(reference) if others else None

    def further(self) -> list[Result]:
        return [part for part in (self.speed, self.tasks, self.engine) if part is not None]

    def answer(self) -> list[str]:
        reference, *others = self.perplexities
        lines = [each.against(reference) for each in others] or reference.answer()[:1]
        if self.kl is not None:
            told = compare(np.zeros_like(self.kl), self.kl)
            lines.append(f"KL {told.change:.3g} nats a token from it ({between(told.low, told.high)}).")
        mine, dense = (self.perplexities[at].measured_on.model for at in (-1, 0))
        if self.sizes:
            of = f" (of {self.sizes[0].told()}: {self.sizes[-1].bytes / self.sizes[0].bytes:.1%})" if others else ""
            lines.append(f"{self.sizes[-1].told()}{of}.")
        if others and mine.parameters != dense.parameters:
            kept = mine.parameters / dense.parameters
            lines.append(
                f"{mine.parameters:,} parameters of {dense.parameters:,} ({kept:.1%}), {mine.num_layers} layers."
            )
        for part in (self.speed, self.tasks, self.engine):
            lines += part.answer() if part else []
        if max(self.zeros) >= SPARSE:
            lines.append(f"{max(self.zeros):.0%} of the entries are zero; the size is what their storage takes.")
        if not self.tasks:
            lines.append("Perplexity is of one text; tasks, above all ones that the model writes for, can lose more.")
        return [*lines[: LINES - 1], reference.measured_on.line()]

    def headline(self) -> str:
        return self.perplexities[0].headline()


def zero_share(model: PreTrainedModel) -> float:
    """Share of zeros among the entries of the tensors with two or more dimensions in the layers of `model`.

    0 if all weights are packed, because packed integers are not entries.
    """
    zeros = entries = 0
    for index, layer in enumerate(find_structure(model).layers):
        with layer_held(model, index):
            for p in layer.parameters():
                if p.ndim > 1 and p.is_floating_point():
                    zeros += int((p.detach() == 0).sum())
                    entries += p.numel()
    return zeros / max(entries, 1)
