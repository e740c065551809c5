"""Cut, mended and healed by the README's own commands: is any step worse than the one before it?

    python experiments/6_recovery/never_worse/run.py --model MODEL --text A.txt --text B.jsonl --unseen C.txt

Runs `prune --remove 25%`, `prune --remove 25% --mend` and `heal` on each text, with all defaults but what --heal adds,
and scores what they wrote on --unseen. What is finished stays in runs/experiments/ and is not run again. Writes
MODEL-TEXT.json beside this file; the table of all of them goes into README.md by `make tables`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import lyapunov_prune as lp
from experiments.by_commands import against, losses, run_once
from experiments.common import Each, Model, Scored, Unseen, plain, read_text, run_command
from experiments.statements import bullets, ratio, runs, span, table
from lyapunov_prune.healing.report import Healing
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
WORDS = {"better": "better", "alike": "no significant difference", "kept": "kept as it was", "worse": "worse"}


@dataclass(frozen=True)
class State:
    """A checkpoint: the options that made it, the loss of every unseen window (nats a token), and how long that took.

    `written` is False where the command judged that its step does not pay, and wrote nothing: the losses are then
    those of the state before.
    """

    name: str
    options: str
    removed: tuple[int, ...]
    windows: np.ndarray
    seconds: float
    written: bool
    told: str


@dataclass(frozen=True)
class NeverWorse(Result):
    """The dense model's losses on the unseen windows, and those of each state, in the order in which they were made."""

    dense: np.ndarray
    states: tuple[State, ...]
    text: str
    measured_on: MeasuredOn


def main(
    unseen: Unseen,
    model: Model = Model(device="cpu"),
    text: Each = None,
    remove: Annotated[str, typer.Option(help="as the command prune takes it")] = "25%",
    prune: Annotated[str, typer.Option(help="more options of prune, as one word")] = "",
    heal: Annotated[str, typer.Option(help="more options of heal, as one word")] = "",
    scored: Scored = 8192,
) -> None:
    loaded = model.load()
    judged = read_text(loaded, unseen, scored, 512, "all")
    dense = lp.perplexity(loaded.model, judged, description="dense").windows
    on = judged.measured_on(loaded.model)
    del loaded
    for source in text or ["builtin"]:
        folder = model.jobs / "never-worse" / f"{Path(source).stem}-{remove.rstrip('%')}"
        common = ["--text", source, "--device", model.device, *(["--dtype", model.dtype] if model.dtype else [])]
        cut = ["prune", model.name, "--remove", remove, *common, *shlex.split(prune)]
        states = [_state(folder / "cut", "cut", cut, judged, None)]
        states.append(_state(folder / "mended", "mended", [*cut, "--mend"], judged, states[-1]))
        taught = ["heal", str(folder / "mended"), "--teacher", model.name, *common, *shlex.split(heal)]
        states.append(_state(folder / "healed", "healed", taught, judged, states[-1]))
        found = NeverWorse(dense, tuple(states), plain(source), on)
        found.save(HERE / f"{on.model.name}-{Path(source).stem}.json")


def _state(output: Path, name: str, command: list[str], judged: lp.TokenBatch, before: State | None) -> State:
    """What a command made; its exit code 1 says that it wrote nothing."""
    ran = run_once(output, command)
    if ran.code == 1:
        assert before is not None, "a plain removal fails its gate: see what the command says"
        return State(name, ran.options, before.removed, before.windows, ran.seconds, False, "nothing beat the start")
    removed = Provenance.load(output / PROVENANCE).plan.remove
    return State(name, ran.options, removed, losses(output, judged, name), ran.seconds, True, _told(output))


def _told(output: Path) -> str:
    """What the report of healing says of what was kept."""
    path = output / "healing.json"
    return Healing.load(path).told() if path.is_file() else ""


def written() -> dict[str, str]:
    results = [NeverWorse.load(path) for path in sorted(HERE.glob("*.json"))]
    steps = [_verdict(a, b).partition(":")[0] for r in results for a, b in pairwise(r.states)]
    over = np.array([[float((s.windows - r.dense).mean()) for s in r.states] for r in results])
    settings = dict.fromkeys(f"{r.measured_on.line()}; dense perplexity {ratio(r.dense)}" for r in results)
    return {
        "setting": bullets(*settings),
        "table": _table(results),
        "steps": str(len(steps)),
        **{name: str(steps.count(word)) for name, word in WORDS.items()},
        **dict(zip(("cut", "mended", "healed"), map(span, np.exp(over).T), strict=True)),
    }


def _table(results: list[NeverWorse]) -> str:
    rows: list[tuple[Any, ...]] = []
    for r in results:
        before: State | None = None
        for s in r.states:
            step = "—" if before is None else _verdict(before, s)
            rows.append(
                (
                    f"{r.measured_on.model.name}, {Path(r.text).stem}",
                    s.name,
                    runs(s.removed),
                    ratio(s.windows),
                    ratio(s.windows - r.dense),
                    step,
                    f"{s.seconds / 60:.1f}",
                )
            )
            before = s
    head = ("model, learnt from", "state", "removed", "perplexity", "/ dense", "against the state before", "minutes")
    return table(head, rows)


def _verdict(before: State, after: State) -> str:
    """What the unseen text says of a step: better or worse by the paired interval, or no significant difference."""
    if not after.written:
        return "kept as it was"
    return against(before.windows, after.windows)


if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
