"""What experiments share that change a model by one text and score it on the windows of another, which is unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import read_text
from experiments.statements import bullets, ratio
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.results.result import MeasuredOn, Result


@dataclass(frozen=True)
class OnUnseenText(Result):
    """Losses of the `dense` model (windows,), nats a token, on the text `measured_on`.

    `calibrated_on` is the text that decided what was done to the model; `DONE` says what that was.
    """

    dense: np.ndarray
    calibrated_on: MeasuredOn
    measured_on: MeasuredOn

    DONE: ClassVar[str] = "chosen on"

    @classmethod
    def all(cls, folder: Path) -> list[Self]:
        """The results that lie in `folder`, one a model and text."""
        return [cls.load(path) for path in sorted(folder.glob("*.json"))]

    @property
    def name(self) -> str:
        """`MODEL, TEXT`."""
        return f"{self.measured_on.model.name}, {Path(self.measured_on.text).stem}"

    def headline(self) -> str:
        return f"{self.measured_on.line()}; {self.DONE} {self.calibrated_on.line()}"

    def setting(self) -> str:
        return f"{self.headline()}; dense perplexity {ratio(self.dense)}"


def settings(results: Iterable[OnUnseenText]) -> str:
    return bullets(*(result.setting() for result in results))


def two_texts(
    loaded: lp.models.Decoder, learnt: tuple[str, int], unseen: tuple[str, int], context: int, scored_context: int
) -> tuple[lp.TokenBatch, lp.TokenBatch, tuple[MeasuredOn, MeasuredOn]]:
    """The beginnings of two texts, each given as source and number of tokens; then what is measured on them.

    Raises LyapunovPruneError where the texts share passages.
    """
    batches = read_text(loaded, *learnt, context, "all"), read_text(loaded, *unseen, scored_context, "all")
    require_disjoint(*batches)
    first, second = (batch.measured_on(loaded.model) for batch in batches)
    return *batches, (first, second)


def recovered(
    model: PreTrainedModel, removed: tuple[int, ...], learnt: lp.TokenBatch, steps: int
) -> dict[str, Callable[[], PreTrainedModel]]:
    """Without the layers `removed`: cut, mended (once), and mended and healed for so many steps of one window."""
    mended = cache(lambda: lp.mend(model, removed, learnt))
    return {
        "cut": lambda: lp.remove_layers(model, removed),
        "mended": mended,
        "healed": lambda: lp.heal(mended(), model, learnt, steps=steps).model,
    }
