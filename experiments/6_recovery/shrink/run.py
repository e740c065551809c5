"""One command against the same steps by hand: `shrink` on the models and texts of never_worse.

    python experiments/6_recovery/shrink/run.py --model MODEL --text A.txt --text B.jsonl --unseen C.txt

Runs `shrink --remove 25%` on each text, with all defaults but what --options adds, and scores the dense model and the
result on --unseen. Give --model, --text, --unseen and --scored as for never_worse: its last state is what `shrink`
is compared with, on the same windows. A finished command stays in runs/experiments/ and is not run again. Writes
MODEL-TEXT.json and recovery.svg beside this file; the tables go into README.md by `make tables`.
"""

from __future__ import annotations

import importlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

import lyapunov_prune as lp
from experiments.by_commands import against, losses, run_once
from experiments.common import Again, Each, Model, Scored, Unseen, draw, is_kept, plain, read_text, run, show
from experiments.statements import ratio, runs, table
from lyapunov_prune.errors import CheckFailed
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.report.drawing import GREY, log_axis, one_panel, svg
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.shrinking.report import REPORT, Shrinking, Taken

BY_HAND = importlib.import_module("experiments.6_recovery.never_worse.run")
HERE = Path(__file__).parent
THERE = HERE.parent / "never_worse"
SHRUNK = "one command"
COLOURS = {"cut": "#D55E00", "mended": "#E69F00", "healed": "#0072B2", SHRUNK: "#009E73"}
SHAPES = {"cut": "o", "mended": "o", "healed": "o", SHRUNK: "D"}


@dataclass(frozen=True)
class OneCommand(Result):
    """What `shrink` with `options` made of a model after learning from `text`, and how long it took.

    `dense` and `windows` are the losses of every unseen window, in nats a token. `parameters` and `size` (bytes of all
    weights) are before and after. `steps` say what was kept and what was dropped.
    """

    options: str
    text: str
    removed: tuple[int, ...]
    parameters: tuple[int, int]
    size: tuple[int, int]
    steps: tuple[Taken, ...]
    seconds: float
    dense: np.ndarray
    windows: np.ndarray
    measured_on: MeasuredOn


def main(
    unseen: Unseen,
    model: Model = Model(device="cpu"),
    text: Each = None,
    remove: Annotated[str, typer.Option(help="as the command shrink takes it")] = "25%",
    options: Annotated[str, typer.Option(help="more options of shrink, as one word")] = "",
    scored: Scored = 8192,
    again: Again = False,
) -> None:
    name = Path(plain(model.name)).name
    files = {source: HERE / f"{name}-{Path(source).stem}.json" for source in text or ["builtin"]}
    wanted = {source: file for source, file in files.items() if not is_kept(file, again)}
    if wanted:
        loaded = model.load()
        judged = read_text(loaded, unseen, scored, 512, "all")
        dense = lp.perplexity(loaded.model, judged, description="dense").windows
        on = judged.measured_on(loaded.model)
        del loaded
    for source, file in wanted.items():
        folder = model.jobs / "shrink" / f"{Path(source).stem}-{remove.rstrip('%')}"
        place = ["--text", source, "--device", model.device, *(["--dtype", model.dtype] if model.dtype else [])]
        ran = run_once(folder, ["shrink", model.name, "--remove", remove, *place, *shlex.split(options)])
        if ran.code:
            raise CheckFailed("shrink wrote nothing: see what it says")
        report = Shrinking.load(folder / REPORT)
        found = OneCommand(
            options=ran.options,
            text=plain(source),
            removed=report.plan.remove,
            parameters=report.parameters,
            size=report.size,
            steps=report.steps,
            seconds=ran.seconds,
            dense=dense,
            windows=losses(folder, judged, "shrunk"),
            measured_on=on,
        )
        found.save(file)
    draw(HERE, {"recovery": figure(*_results())})
    show(written())


def _results() -> tuple[list[Any], dict[tuple[str, str], OneCommand]]:
    """What was done by hand, and what `shrink` came to by model and text."""
    by_hand = [BY_HAND.NeverWorse.load(path) for path in sorted(THERE.glob("*.json"))]
    shrunk = [OneCommand.load(path) for path in sorted(HERE.glob("*.json"))]
    return by_hand, {_key(r): r for r in shrunk}


def _key(result: Any) -> tuple[str, str]:
    return result.measured_on.model.name, result.text


def figure(by_hand: list[Any], shrunk: dict[tuple[str, str], OneCommand]) -> str:
    """Perplexity over that of the dense model: a row a model and text, a mark a state with its 95 % interval."""
    states = {_key(r): [(s.name, s.windows - r.dense) for s in r.states] for r in by_hand}
    for key, one in shrunk.items():
        states.setdefault(key, []).append((SHRUNK, one.windows - one.dense))
    drawing, axes = one_panel(8, 1.3 + 0.42 * len(states))
    axes.axvline(1, color=GREY, linewidth=1, linestyle=":")
    for row, marks in enumerate(states.values()):
        for place, (name, over) in enumerate(marks):
            value, height = float(np.exp(over.mean())), row + 0.14 * (place - (len(marks) - 1) / 2)
            axes.plot(interval_of(over), [height] * 2, color=COLOURS[name], linewidth=1.5)
            axes.plot(value, height, SHAPES[name], color=COLOURS[name], markersize=6)
    axes.set_yticks(range(len(states)), [f"{model}, {Path(text).stem}" for model, text in states])
    axes.set_ylim(len(states) - 0.5, -0.5)
    log_axis(axes, "x")
    axes.xaxis.set_major_locator(FixedLocator([1, 1.25, 1.5, 2, 3, 4, 5, 7, 10]))
    axes.set_xlabel("perplexity / that of the dense model, on a text that no step has seen")
    shown = [name for name in COLOURS if any(name == mark for marks in states.values() for mark, _ in marks)]
    handles = [Line2D([], [], color=COLOURS[name], marker=SHAPES[name], linestyle="", label=name) for name in shown]
    drawing.legend(handles=handles, loc="outside upper center", ncols=len(shown), frameon=False)
    return svg(drawing)


def written() -> dict[str, str]:
    by_hand, shrunk = _results()
    hand = {_key(r): r for r in by_hand}
    rows = list(shrunk.values())
    return {
        "setting": "".join(f"- {r.measured_on.line()}; `lyapunov-prune {r.options}`\n" for r in rows),
        "table": _table(rows, hand),
        "short": _short(rows, hand),
        "steps": _steps(rows),
    }


def _table(rows: list[OneCommand], hand: dict[tuple[str, str], Any]) -> str:
    head = (
        "model, learnt from",
        "parameters",
        "removed",
        "perplexity / dense",
        "by hand / dense",
        "against by hand",
        "minutes",
        "by hand",
    )
    cells = []
    for r in rows:
        rival = hand.get(_key(r))
        if rival is not None and rival.measured_on.text_hash != r.measured_on.text_hash:
            raise ValueError(f"{r.measured_on.model.name}: never_worse was scored on other windows; score on these")
        other: tuple[Any, ...] = (None, None)
        if rival is not None:
            last = rival.states[-1].windows
            other = ratio(last - rival.dense), against(last, r.windows)
        cells.append(
            (
                f"{r.measured_on.model.name}, {Path(r.text).stem}",
                f"{r.parameters[0] / 1e6:.1f} M → {r.parameters[1] / 1e6:.1f} M",
                runs(r.removed),
                ratio(r.windows - r.dense),
                *other,
                f"{r.seconds / 60:.1f}",
                None if rival is None else f"{_minutes(rival):.1f}",
            )
        )
    return table(head, cells)


def _short(rows: list[OneCommand], hand: dict[tuple[str, str], Any]) -> str:
    """For the README: what one command leaves of a model, and whether the same steps by hand leave more."""
    return table(
        ("a quarter of the layers gone", "parameters", "perplexity / dense", "against by hand", "minutes"),
        [
            (
                r.measured_on.model.name,
                f"{r.parameters[0] / 1e6:.0f} M → {r.parameters[1] / 1e6:.0f} M",
                ratio(r.windows - r.dense),
                against(rival.states[-1].windows, r.windows),
                f"{r.seconds / 60:.0f} ({_minutes(rival):.0f} by hand)",
            )
            for r in rows
            if (rival := hand.get(_key(r))) is not None
        ],
    )


def _minutes(rival: Any) -> float:
    """Of the commands that lead to the last state; `prune --mend` begins anew, so the plain cut is none of them."""
    return sum(state.seconds for state in rival.states[1:]) / 60


def _steps(rows: list[OneCommand]) -> str:
    """What every step said."""
    return table(
        ("model, learnt from", "step", "kept", "what the judging text says", "minutes"),
        [
            (f"{r.measured_on.model.name}, {Path(r.text).stem}", s.name, _yes(s.kept), s.told, f"{s.seconds / 60:.1f}")
            for r in rows
            for s in r.steps
        ],
    )


def _yes(kept: bool) -> str:
    return "yes" if kept else "no"


if __name__ == "__main__":
    run(main)
