"""The headline: what one command leaves of a model without a quarter of its layers, on texts that decided nothing.

    python experiments/6_recovery/shrink/run.py --model MODEL --unseen A.txt --unseen B.txt

Runs `shrink --remove 25%` with --options and defaults else, from a commit whose files are unchanged, and scores the
dense model and the result on the second half of each --unseen, a text to report on (`cut_texts.py`). A finished
command stays in runs/experiments/ and is not run again. Writes MODEL.json and recovery.svg beside this file; the
tables go into README.md by `make tables`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import lyapunov_prune as lp
from experiments.by_commands import losses, run_once
from experiments.common import Again, Model, Scored, committed, draw, is_kept, plain, read_text, run, show
from experiments.statements import bullets, ratio, runs, table
from lyapunov_prune.errors import CheckFailed
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.report.drawing import COLOURS, GREY, by_rows, log_axis, one_panel
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.shrinking.report import REPORT, Shrinking, Taken

HERE = Path(__file__).parent


@dataclass(frozen=True)
class OneCommand(Result):
    """What `shrink` of `commit` with `options` made of a model after learning from `learnt_on`, and in how long.

    `dense` and `windows` are the losses of every window of each unseen text, in nats a token, as `measured_on` has the
    texts. `parameters` and `size` (bytes of all weights) are before and after. `steps` say what was kept and dropped.
    """

    options: str
    commit: str
    removed: tuple[int, ...]
    parameters: tuple[int, int]
    size: tuple[int, int]
    steps: tuple[Taken, ...]
    seconds: float
    learnt_on: MeasuredOn
    dense: tuple[np.ndarray, ...]
    windows: tuple[np.ndarray, ...]
    measured_on: tuple[MeasuredOn, ...]

    @property
    def name(self) -> str:
        return self.measured_on[0].model.name

    @property
    def over(self) -> dict[str, np.ndarray]:
        """Loss of every window over that of the dense model, by text."""
        pairs = zip(self.measured_on, self.windows, self.dense, strict=True)
        return {Path(on.text).stem: windows - dense for on, windows, dense in pairs}


def main(
    unseen: Annotated[list[str], typer.Option(help="texts to score on")],
    model: Model = Model(device="cpu"),
    remove: Annotated[str, typer.Option(help="as the command shrink takes it")] = "25%",
    options: Annotated[str, typer.Option(help="more options of shrink, as one word")] = "",
    scored: Scored = 4096,
    again: Again = False,
) -> None:
    file = HERE / f"{Path(plain(model.name)).name}.json"
    if not is_kept(file, again):
        commit = committed()
        folder = model.jobs / "shrink" / commit
        place = ["--device", model.device, *(["--dtype", model.dtype] if model.dtype else [])]
        ran = run_once(folder, ["shrink", model.name, "--remove", remove, *place, *shlex.split(options)])
        if ran.code:
            raise CheckFailed("shrink wrote nothing: see what it says")
        loaded = model.load()
        # The first halves have reported for a run on a busy machine (the chapter's README has its numbers).
        texts = [read_text(loaded, text, scored, 512, "evaluation") for text in unseen]
        report = Shrinking.load(folder / REPORT)
        on = tuple(text.measured_on(loaded.model) for text in texts)
        given = [model.name, *shlex.split(options)]
        learnt = replace(report.learnt_on, text=told(report.learnt_on.text, given), model=on[0].model)
        found = OneCommand(
            options=ran.options,
            commit=commit,
            removed=report.plan.remove,
            parameters=report.parameters,
            size=report.size,
            steps=tuple(replace(s, told=told(s.told, given)) for s in report.steps),
            seconds=ran.seconds,
            learnt_on=learnt,
            dense=tuple(lp.perplexity(loaded.model, text, description="dense").windows for text in texts),
            windows=tuple(losses(folder, text, "shrunk") for text in texts),
            measured_on=on,
        )
        found.save(file)
    draw(HERE, {"recovery": figure(results())})
    show(written())


def told(line: str, words: Sequence[str]) -> str:
    """What a step said, with `words` that are paths of this machine under their plain names."""
    for word in words:
        line = line.replace(word, plain(word))
    return line


def results(within: str = ".") -> list[OneCommand]:
    return [OneCommand.load(path) for path in sorted((HERE / within).glob("*.json"))]


def figure(rows: Sequence[OneCommand]) -> str:
    """Perplexity over that of the dense model: a row a model, a mark a text with its 95 % interval."""
    drawing, axes = one_panel(7, 1.2 + 0.5 * len(rows))
    axes.axvline(1, color=GREY, linewidth=1, linestyle=":")
    for row, one in enumerate(rows):
        for place, ((text, over), colour) in enumerate(zip(one.over.items(), cycle(COLOURS.values()), strict=False)):
            height = row + 0.2 * (place - (len(one.over) - 1) / 2)
            axes.plot(interval_of(over), [height] * 2, color=colour, linewidth=1.5)
            axes.plot(np.exp(over.mean()), height, "o", color=colour, label=None if row else text)
    log_axis(axes, "x")
    return by_rows(drawing, axes, [one.name for one in rows], "perplexity / that of the dense model")


def written() -> dict[str, str]:
    rows = results()
    return {
        "setting": bullets(*map(_setting, rows)),
        "table": _table(rows),
        "earlier": _short(earlier) if (earlier := results("earlier")) else "",
        "short": _short(rows),
        "steps": _steps(rows),
    }


def _setting(r: OneCommand) -> str:
    on, learnt = r.measured_on[0], r.learnt_on
    texts = "; ".join(
        f"{each.text} ({each.text_hash[:12]}), dense perplexity {ratio(dense)}"
        for each, dense in zip(r.measured_on, r.dense, strict=True)
    )
    return (
        f"{r.name}, {on.dtype} on {on.device}: `lyapunov-prune {r.options}` of commit {r.commit}, which learnt from "
        f"{learnt.tokens} tokens of {learnt.text} ({learnt.split}, {learnt.text_hash[:12]}); scored on {on.tokens} "
        f"tokens each, context {on.context}, of {texts}"
    )


def _short(rows: Sequence[OneCommand]) -> str:
    """For the README: what one command leaves of a model, on each text."""
    head = ("a quarter of the layers gone", "parameters", *(f"on {text}" for text in rows[0].over), "minutes", "commit")
    return table(
        head,
        [
            (
                r.name,
                f"{r.parameters[0] / 1e6:.0f} M → {r.parameters[1] / 1e6:.0f} M",
                *map(ratio, r.over.values()),
                f"{r.seconds / 60:.0f}",
                r.commit,
            )
            for r in rows
        ],
    )


def _learnt(r: OneCommand) -> str:
    return Path(r.learnt_on.text.split(" (")[0]).stem  # what `self` adds tells the weights and the seed


def _table(rows: Sequence[OneCommand]) -> str:
    head = ("model", "learnt from", "removed", *(f"perplexity / dense on {text}" for text in rows[0].over), "minutes")
    cells: list[tuple[Any, ...]] = [
        (r.name, _learnt(r), runs(r.removed), *map(ratio, r.over.values()), f"{r.seconds / 60:.1f}") for r in rows
    ]
    return table(head, cells)


def _steps(rows: Sequence[OneCommand]) -> str:
    """What every step said of itself."""
    return table(
        ("model", "step", "kept", "what the judging text says", "minutes"),
        [(r.name, s.name, "yes" if s.kept else "no", s.told, f"{s.seconds / 60:.1f}") for r in rows for s in r.steps],
    )


if __name__ == "__main__":
    run(main)
