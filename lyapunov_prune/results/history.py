"""How a model was made: every step that changed it, and the texts that the steps saw.

The history is carried by a model in memory and written next to its weights. `data.unseen` checks it before a model is
scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

HISTORY = "history.json"  # next to the weights of every checkpoint
_NOTE = "_lyapunov_prune_history"  # a plain attribute of the model: a deep copy has it, save_pretrained does not


@dataclass(frozen=True)
class Step:
    """`prune`, `compress`, `heal`, `export` or `shrink` of the model `source`, with the texts that it `saw`.

    `shrink` is that of --size; with --remove it is `prune` and `heal`.
    """

    kind: str
    source: str
    saw: tuple[MeasuredOn, ...]


@dataclass(frozen=True)
class History(Result):
    """The steps that made a model, oldest first; empty for a model that this program has not changed."""

    steps: tuple[Step, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row per step and text, and one for a step without text."""
        rows = [(i, step, on) for i, step in enumerate(self.steps, start=1) for on in step.saw or (None,)]
        return pd.DataFrame(
            [
                {"step": i, "kind": step.kind, "of": step.source, "text": on and on.text, "split": on and on.split}
                for i, step, on in rows
            ],
            columns=["step", "kind", "of", "text", "split"],
        )


def read_history(folder: str | Path) -> History:
    """The history in a checkpoint folder. Raises LyapunovPruneError when its file is damaged."""
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
    return read_history(name) if name else History(())  # "" would mean the current folder


def add_step(model: PreTrainedModel, kind: str, saw: Iterable[MeasuredOn], *sources: PreTrainedModel) -> None:
    """Let `model` carry `history_with` of the models it was made from."""
    keep_history(model, history_with(kind, saw, *sources))


@contextmanager
def one_more_step(model: PreTrainedModel, kind: str) -> Iterator[None]:
    """Inside the block `model` carries this step, for what is written of it as it is."""
    before = history_of(model)
    add_step(model, kind, (), model)
    try:
        yield
    finally:
        keep_history(model, before)


def history_with(kind: str, saw: Iterable[MeasuredOn], *sources: PreTrainedModel) -> History:
    """The histories of `sources` followed by this step; a text is listed once."""
    steps: list[Step] = []
    for source in sources:
        steps += [step for step in history_of(source).steps if step not in steps]
    texts = tuple({on.text_hash: on for on in saw}.values())
    name = sources[0].config._name_or_path or type(sources[0]).__name__
    return History((*steps, Step(kind, name, texts)))
