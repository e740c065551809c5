"""Which text to learn from if nobody says what the model will read: its own, two kinds mixed, or one kind (no paper).

    python experiments/6_recovery/texts_to_mend_by/run.py --layers 12-18 --text c4.jsonl --text code

The same layers go, whatever the text. The gaps are mended, and the model healed from there, on what the dense model
writes itself, on half prose and half code (the built-in text and `code`), and on the first half of each `--text`. Each
is scored on the second half of every `--text`, so that what a text teaches is seen on its own kind and on the others.
Writes MODEL.json beside this file; what all of them say goes into README.md by `make tables`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, Scored, plain, read_text, run_command
from experiments.statements import bullets, ratio, runs, table
from lyapunov_prune.cli.options import layer_indices
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.data.sources import BUILTIN, CODE, SELF
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
RANK = 16  # of the updates that heal, as `shrink` heals in half precision
MIX = f"half {BUILTIN}, half {CODE}"


@dataclass(frozen=True)
class Taught:
    """Mended, or `healed` from there, on the text `by`: the loss of every window of each text that scores, by name.

    `seconds` are those of this step, `writing` those in which the model wrote the text.
    """

    by: str
    healed: bool
    windows: dict[str, np.ndarray]
    seconds: float
    writing: float


@dataclass(frozen=True)
class TextsToMendBy(Result):
    """`dense` and `cut` as `Taught.windows`. Lessons are of `tokens` tokens, healing of `steps` steps."""

    removed: tuple[int, ...]
    dense: dict[str, np.ndarray]
    cut: dict[str, np.ndarray]
    taught: tuple[Taught, ...]
    tokens: int
    steps: int
    learnt_on: tuple[MeasuredOn, ...]
    measured_on: tuple[MeasuredOn, ...]

    def of(self, by: str, healed: bool = True) -> Taught:
        return next(t for t in self.taught if t.by == by and t.healed == healed)

    def between(self, by: str, other: str) -> dict[str, np.ndarray]:
        """The losses of the windows of each scored text, healed by one text, less those by another."""
        one, two = self.of(by).windows, self.of(other).windows
        return {name: one[name] - two[name] for name in one}


def main(
    text: Annotated[list[str], typer.Option(help="a kind of text; its halves teach and score")],
    layers: Annotated[str, typer.Option(help="those that go, as the command prune takes them")],
    model: Model = Model(device="cpu"),
    tokens: Annotated[int, typer.Option(help="to learn from")] = 4096,
    context: int = 256,
    scored: Scored = 2048,
    steps: Annotated[int, typer.Option(help="of healing, a window a step")] = 24,
) -> None:
    loaded = model.load()
    jobs = model.jobs / "texts-to-mend-by"
    read = partial(read_text, loaded, tokens=tokens, context=context)
    own: dict[str, Any] = {"tokens": tokens, "context": context, "folder": jobs}
    lessons: dict[str, Callable[[], lp.TokenBatch]] = {
        SELF: partial(lp.self_generated, loaded.model, **own),
        MIX: lambda: mixed(read(BUILTIN), read(CODE)),
        **{plain(name): partial(read, name) for name in text},
    }
    judges = {plain(name): read_text(loaded, name, scored, context, "evaluation") for name in text}
    found = measure(loaded, lessons, judges, layer_indices("--layers", layers), tokens, steps, jobs)
    found.save(HERE / f"{loaded.model.config._name_or_path}.json")


def mixed(first: lp.TokenBatch, second: lp.TokenBatch) -> lp.TokenBatch:
    """As many windows as each has, two of the one and two of the other in turn: every fourth chooses a map's form."""
    rows = [rows[k : k + 2] for k in range(0, len(first) // 2, 2) for rows in (first.ids, second.ids)]
    return replace(first, ids=torch.cat(rows), text=MIX)


def measure(
    loaded: lp.models.Decoder,
    lessons: dict[str, Callable[[], lp.TokenBatch]],
    judges: dict[str, lp.TokenBatch],
    removed: Sequence[int],
    tokens: int,
    steps: int,
    folder: Path,
) -> TextsToMendBy:
    model = loaded.model
    measured_on = tuple(batch.measured_on(model) for batch in judges.values())
    about = {"texts": [on.text_hash for on in measured_on], "removed": list(removed), "tokens": tokens, "steps": steps}
    with Store(folder / "scores", "texts to mend by", about) as store:

        def scores(key: str, make: Callable[[], PreTrainedModel]) -> tuple[dict[str, np.ndarray], float]:
            """The losses of what `make` makes, and the seconds that it took to make."""
            if key not in store:
                began = time.monotonic()
                made = make()
                seconds = time.monotonic() - began
                losses = {
                    name: lp.perplexity(made, batch, description=f"{key} on {name}").windows.tolist()
                    for name, batch in judges.items()
                }
                store.add(key, (losses, seconds))
            losses, seconds = store[key]
            return {name: np.array(values) for name, values in losses.items()}, seconds

        dense, _ = scores("dense", lambda: model)
        cut, _ = scores("cut", lambda: lp.remove_layers(model, removed))
        taught, learnt_on = list[Taught](), list[MeasuredOn]()
        for name, lesson in lessons.items():
            began = time.monotonic()
            batch = lesson()
            if f"writing {name}" not in store:
                store.add(f"writing {name}", time.monotonic() - began)
            for judge in judges.values():
                require_disjoint(batch, judge)
            learnt_on.append(batch.measured_on(model))
            mend = cache(partial(lp.mend, model, removed, batch))

            def heal(mend: Callable[[], PreTrainedModel] = mend, batch: lp.TokenBatch = batch) -> PreTrainedModel:
                return lp.heal(mend(), model, batch, steps=steps, rank=RANK).model

            states = {False: scores(name, mend), True: scores(f"{name}, healed {steps}", heal)}
            taught += [Taught(name, healed, *done, store[f"writing {name}"]) for healed, done in states.items()]
    return TextsToMendBy(tuple(removed), dense, cut, tuple(taught), tokens, steps, tuple(learnt_on), measured_on)


def written() -> dict[str, str]:
    results = [TextsToMendBy.load(path) for path in sorted(HERE.glob("*.json"))]
    return {
        "setting": bullets(*map(setting, results)),
        "taught": taught_by(results),
        **{
            f"{r.measured_on[0].model.name} self over mix on {name}": ratio(losses)
            for r in results
            for name, losses in r.between(SELF, MIX).items()
        },
    }


def setting(result: TextsToMendBy) -> str:
    on = result.measured_on
    texts = "; ".join(f"{each.text} ({each.split}, {each.text_hash[:12]})" for each in on)
    return (
        f"{on[0].model.name}, {on[0].dtype} on {on[0].device}, without layers {runs(result.removed)}; lessons of "
        f"{result.tokens} tokens, {result.steps} steps of healing by rank {RANK}; scored on {on[0].tokens} tokens "
        f"each, context {on[0].context}, of {texts}"
    )


def taught_by(results: list[TextsToMendBy]) -> str:
    """Perplexity over that of the dense model on each kind of text, and the minutes that it took."""
    names = list(results[0].dense)
    rows = []
    for r in results:
        model = r.measured_on[0].model.name
        rows.append((model, "", "cut", *(ratio(r.cut[name] - r.dense[name]) for name in names), None, None))
        for t in r.taught:
            over = (ratio(t.windows[name] - r.dense[name]) for name in names)
            minutes = f"{t.seconds / 60:.1f}", f"{t.writing / 60:.1f}" if t.by == SELF and not t.healed else None
            rows.append((model, t.by, "healed" if t.healed else "mended", *over, *minutes))
    return table(("model", "learnt from", "", *(f"on {name}" for name in names), "minutes", "writing"), rows)


if __name__ == "__main__":
    run_command(main, HERE / "{model}.json", written)
