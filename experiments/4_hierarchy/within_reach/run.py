"""Writing that a small model does right: a line copied, two digits added; dense against compressed, item by item.

    python experiments/4_hierarchy/within_reach/run.py [--model MODEL]

Of GSM8K so small a model solves next to nothing (`two_kinds`), so that no compression could lose anything there.
These two kinds of text it mostly writes right (Representation hierarchies, Figure 1 and Table 1, ask what generation
loses).
Prompts are drawn, with three or six examples before each; an item is right where the line that is written first is the
one asked for. Writes reach.json and reach.svg beside this file, of another model in a folder by its name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from experiments.common import Model, draw, read_text, run_command
from experiments.hierarchies import makers
from experiments.published import GENERATION, MULTIPLE_CHOICE
from experiments.statements import bullets, interval, table
from lyapunov_prune.data.batch import rows_measured_on
from lyapunov_prune.data.text import start_ids
from lyapunov_prune.evaluation.task_scores import TaskScores
from lyapunov_prune.forward.decoding import continued
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.tokenizers import token_ids
from lyapunov_prune.predictions.verdict import wilson
from lyapunov_prune.report.drawing import COLOURS, one_panel, svg
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
CHOSEN = HERE.parent / "two_kinds"
WORDS = (
    "river lamp seven green paper stone window apple music cloud table horse silver bread garden letter winter orange "
    "bridge candle yellow forest mirror basket"
)
STEPS = {"copying": 10, "adding": 4}  # tokens that are written


@dataclass(frozen=True)
class Row:
    """A model, and which items it wrote right."""

    model: str
    copying: np.ndarray
    adding: np.ndarray


@dataclass(frozen=True)
class Reach(Result):
    """The dense model first."""

    rows: tuple[Row, ...]
    seed: int
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn

    def row(self, model: str) -> Row:
        return next(row for row in self.rows if row.model == model)

    def headline(self) -> str:
        counts = ", ".join(f"{len(getattr(self.rows[0], task))} of {task}" for task in STEPS)
        learnt = self.calibrated_on.line()
        return f"{counts}, drawn by seed {self.seed}: {self.measured_on.line()}; compressed on {learnt}"


def main(model: Model = Model(), text: str = "builtin", tokens: int = 2048, items: int = 60, seed: int = 0) -> None:
    folder, loaded = model.folder(HERE), model.load()
    learnt = read_text(loaded, text, tokens, 512)
    tasks = {task: drawn(task, items, seed) for task in STEPS}
    origin = learnt.measured_on(loaded.model)
    made = {"dense": lambda: loaded.model} | makers(loaded, learnt)
    with Store(model.jobs / "reach", "reach", {"text": encode(origin), "tasks": tasks}) as store:
        for name, make in made.items():
            if name not in store:
                made_now = make()
                right = {task: answered(loaded, made_now, asked, STEPS[task]) for task, asked in tasks.items()}
                store.add(name, encode(Row(name, **right)))
        found = Reach(tuple(decode(Row, store[name]) for name in made), seed, written_from(loaded, tasks), origin)
    found.save(folder / "reach.json")
    draw(folder, {"reach": figure(found)})


def drawn(task: str, items: int, seed: int) -> list[tuple[str, str]]:
    """Prompts and the lines that are asked for, no two the same."""
    choose = random.Random(f"{seed} {task}")

    def copying() -> tuple[str, str]:
        words = " ".join(choose.sample(WORDS.split(), 4))
        return f"Input: {words}\nOutput:", words

    def adding() -> tuple[str, str]:
        a, b = choose.randint(1, 9), choose.randint(1, 9)
        return f"{a} + {b} =", str(a + b)

    one, examples = {"copying": (copying, 3), "adding": (adding, 6)}[task]
    found: list[tuple[str, str]] = []
    while len(found) < items:
        shown, asked = [one() for _ in range(examples)], one()
        if asked not in shown:
            before = "".join(f"{prompt} {answer}\n" for prompt, answer in shown)
            found.append((before + asked[0], asked[1]))
    return found


def written_from(loaded: Decoder, tasks: dict[str, list[tuple[str, str]]]) -> MeasuredOn:
    """The record of the items: all prompts, each with the line that is asked for."""
    start = start_ids(loaded.tokenizer)
    rows = [start + token_ids(loaded.tokenizer, f"{a} {b}") for asked in tasks.values() for a, b in asked]
    return rows_measured_on(loaded.model, rows, f"drawn lines for {', '.join(tasks)}", bos=bool(start))


def answered(loaded: Decoder, model: PreTrainedModel, asked: Sequence[tuple[str, str]], steps: int) -> np.ndarray:
    """Which items are right, those of one length written together."""
    start = start_ids(loaded.tokenizer)
    prompts = [start + token_ids(loaded.tokenizer, prompt) for prompt, _ in asked]
    right = np.zeros(len(asked), bool)
    for length in sorted({len(ids) for ids in prompts}):
        here = [i for i, ids in enumerate(prompts) if len(ids) == length]
        ids = torch.tensor([prompts[i] for i in here])
        for i, written in zip(here, continued(read(wrap(model), ids), ids, steps).tolist(), strict=True):
            line = str(loaded.tokenizer.decode(written)).strip().split("\n")[0].strip()
            right[i] = line == asked[i][1]
    return right


def written(folder: Path = HERE) -> dict[str, str]:
    found = Reach.load(folder / "reach.json")
    return {"setting": bullets(found.headline()), "reach": reached(found), "table-1b": table_1b()}


def share(right: np.ndarray) -> str:
    """Percent, with Wilson's interval at 95 %."""
    mean = float(right.mean())
    return f"{interval(*(100 * x for x in (mean, *wilson(mean, len(right)))))} %"


def reached(found: Reach) -> str:
    dense, rows = found.rows[0], []
    for row in found.rows:
        cells: list[object] = [row.model]
        for task in STEPS:
            mine, theirs = getattr(row, task), getattr(dense, task)
            cells += [share(mine), None if row is dense else share(mine[theirs])]
        rows.append(cells)
    return table(["", *(h for task in STEPS for h in (f"{task}, right", "of what dense has right"))], rows)


def table_1b() -> str:
    """Per cent right, dense and without eight attentions or MLPs: ours, and in italics what the paper prints."""
    rows: list[list[object]] = []
    for path in (CHOSEN / "choices.json", *sorted(CHOSEN.glob("*/choices.json"))):
        scores = TaskScores.load(path)
        name = scores.measured_on[0].model.name
        for task in scores.tasks:
            means = [scores.score(model, task.name, "acc").value for model in ("dense", "attention − 8", "mlp − 8")]
            cells = [interval(*(100 * x for x in (mean, *wilson(mean, task.items)))) for mean in means]
            rows.append([f"**{name}**, {task.name}", "choice", *cells])
    for path in (HERE / "reach.json", *sorted(HERE.glob("*/reach.json"))):
        found = Reach.load(path)
        for step in STEPS:
            cells = [share(getattr(found.row(model), step))[:-2] for model in ("dense", "attention − 8", "MLP − 8")]
            rows.append([f"**{found.calibrated_on.model.name}**, {step}", "writing", *cells])
    for kind, printed in (("choice", MULTIPLE_CHOICE), ("writing", GENERATION)):
        rows += [[f"Mistral-7B, {task}", kind, *(f"*{x:g}*" for x in values)] for task, values in printed.items()]
    return table(["model, task", "kind", "dense", "attention − 8", "MLP − 8"], rows)


def figure(found: Reach) -> str:
    """Items right by model, with Wilson's intervals."""
    drawing, axes = one_panel(8, 4.6)
    y = np.arange(len(found.rows))
    for k, (task, colour, marker) in enumerate((("copying", COLOURS["rho"], "o"), ("adding", COLOURS["bi"], "s"))):
        each: Any = [getattr(row, task) for row in found.rows]
        mean = np.array([100 * right.mean() for right in each])
        bars = np.abs(100 * np.array([wilson(right.mean(), len(right)) for right in each]).T - mean)
        axes.errorbar(mean, y + 0.2 * k - 0.1, xerr=bars, fmt=marker, markersize=4, capsize=2, color=colour, label=task)
    axes.set_yticks(y, [row.model for row in found.rows])
    axes.invert_yaxis()
    axes.set_xlabel("items written right, %")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return svg(drawing)


if __name__ == "__main__":
    run_command(main, HERE / "reach.json", written)
