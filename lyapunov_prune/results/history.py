"""How a model was made: every step that changed it, and the texts that the steps saw.

The history stays with a model in memory, step after step, and is written beside its weights. Whoever scores the
model asks it (`data.unseen`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

HISTORY = "history.json"  # beside the weights of every checkpoint
_NOTE = "_lyapunov_prune_history"  # a plain attribute of the model: a deep copy has it, save_pretrained does not


@dataclass(frozen=True)
class Step:
    """One change of a model: `prune`, `compress` or `heal`, of the model `source`, decided or learnt on `saw`."""

    kind: str
    source: str
    saw: tuple[MeasuredOn, ...]


@dataclass(frozen=True)
class History(Result):
    """The steps that made a model, oldest first; none for a model that this program never changed."""

    steps: tuple[Step, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row a step and text, and one for a step that saw none."""
        rows = [(i, step, on) for i, step in enumerate(self.steps, start=1) for on in step.saw or (None,)]
        return pd.DataFrame(
            [
                {"step": i, "kind": step.kind, "of": step.source, "text": on and on.text, "split": on and on.split}
                for i, step, on in rows
            ],
            columns=["step", "kind", "of", "text", "split"],
        )


def read_history(folder: str | Path) -> History:
    """The history in a checkpoint's folder. Raises LyapunovPruneError when its file is damaged."""
    path = Path(folder) / HISTORY
    return History.load(path) if path.is_file() else History(())


def keep_history(model: PreTrainedModel, history: History) -> None:
    setattr(model, _NOTE, history)


def history_of(model: PreTrainedModel) -> History:
    """The history that `model` carries, or that of the folder from which plain transformers loaded it."""
    carried: History | None = vars(model).get(_NOTE)
    if carried is not None:
        return carried
    name = model.config._name_or_path
    return read_history(name) if name else History(())  # "" would be the current folder


def add_step(model: PreTrainedModel, kind: str, saw: Iterable[MeasuredOn], *sources: PreTrainedModel) -> None:
    """Let `model` carry `history_with` of the models it was made from."""
    keep_history(model, history_with(kind, saw, *sources))


def history_with(kind: str, saw: Iterable[MeasuredOn], *sources: PreTrainedModel) -> History:
    """The histories of `sources`, and this step that makes a model of them; a text counts once."""
    steps: list[Step] = []
    for source in sources:
        steps += [step for step in history_of(source).steps if step not in steps]
    texts = tuple({on.text_hash: on for on in saw}.values())
    name = sources[0].config._name_or_path or type(sources[0]).__name__
    return History((*steps, Step(kind, name, texts)))
