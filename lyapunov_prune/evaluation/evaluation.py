"""What `lyapunov-prune eval` measures: perplexity, and speed on request, against another model or alone."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from lyapunov_prune.evaluation.perplexity import Perplexity
from lyapunov_prune.evaluation.speed import Speed
from lyapunov_prune.results import Result


@dataclass(frozen=True)
class Evaluation(Result):
    """Perplexity of one model, or of two on the same tokens; speeds measured in one run."""

    perplexities: tuple[Perplexity, ...]  # the reference model first, when there is one
    speed: Speed | None

    def to_frame(self) -> pd.DataFrame:
        rows = []
        for found in self.perplexities:
            low, high = found.ratio_interval(self.perplexities[0])
            rows.append(
                {
                    "model": found.measured_on.model.name,
                    "perplexity": found.value,
                    "× first": found.value / self.perplexities[0].value,
                    "low": low,
                    "high": high,
                    "layers": found.measured_on.model.num_layers,
                    "parameters": found.measured_on.model.parameters,
                }
            )
        frame = pd.DataFrame(rows)
        return frame if len(rows) > 1 else frame.drop(columns=["× first", "low", "high"])

    def headline(self) -> str:
        return self.perplexities[0].headline()
