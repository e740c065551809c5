"""How far a removal of layers comes for the greedy oracle's time: chosen, mended, healed (§6.5; no paper has the rest).

    python experiments/6_recovery/goals/run.py [--model MODEL] --text A.txt --text builtin --unseen B.txt

Everything is chosen, mended and taught on the beginning of `--text`, one result a text, and scored on that of
`--unseen`. Times are seconds of the processor, one thread, so that other work on the machine does not count. Writes
MODEL-TEXT.json beside this file; what all of them say goes into README.md by `make tables`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Each, Model, Scored, Unseen, read_text, run_command
from experiments.compressions import told
from experiments.statements import ratio, runs, span, table
from experiments.unseen import OnUnseenText, settings
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
SCORED = 1024  # tokens that the oracle scores every trial on
CHOSEN_ON = 4096  # tokens that a criterion chooses on
# `best` as it is, and comparing its sets mended.
CRITERIA, MENDED, HEALED = ("angular", "best"), "best-mended", "angular"
STEP = 256  # tokens that a step of healing learns from
TIMES = (0.5, 1.0)  # of the oracle's time, for choosing, mending and healing together
# Set for seven layers of SmolLM2-135M before any of it was measured: perplexity over that of the greedy oracle.
GOALS = {"cut": 0.80, "mended": 0.60, "healed": 0.45}


@dataclass(frozen=True)
class Way:
    """A model without `removed`: how its layers were chosen, what was done then, in how many seconds all in all.

    `times` is the share of the oracle's time that healing was to end in, 0 where nothing is healed.
    """

    criterion: str
    state: str
    removed: tuple[int, ...]
    windows: np.ndarray
    seconds: float
    times: float
    steps: int


@dataclass(frozen=True)
class GoalsOnOneText(OnUnseenText):
    """The first of the ways is the oracle's cut."""

    ways: tuple[Way, ...]

    DONE: ClassVar[str] = "chosen, mended and taught on"

    @property
    def oracle(self) -> Way:
        return self.ways[0]


def main(
    unseen: Unseen,
    model: Model = Model(device="cpu"),
    text: Each = None,
    remove: int = 7,
    tokens: Annotated[int, typer.Option(help="to choose, mend and learn from")] = 16384,
    context: int = 512,
    scored: Scored = 8192,
) -> None:
    torch.set_num_threads(1)  # what the processor spends is then what the work takes
    loaded = model.load()
    judged = read_text(loaded, unseen, scored, 2 * context, "all")
    for source in text or ["builtin"]:
        learnt = read_text(loaded, source, tokens, context, "calibration" if source == "builtin" else "all")
        require_disjoint(learnt, judged)
        found = measure(loaded, learnt, judged, remove, model.jobs / "goals")
        found.save(HERE / f"{loaded.model.config._name_or_path}-{Path(learnt.text).stem}.json")


def measure(
    loaded: lp.models.Decoder, learnt: lp.TokenBatch, judged: lp.TokenBatch, remove: int, folder: Path
) -> GoalsOnOneText:
    model = loaded.model
    origins = learnt.measured_on(model), judged.measured_on(model)
    with Store(folder / learnt.text_hash[:16], "goals", {"texts": encode(origins), "remove": remove}) as store:

        def once(key: str, make: Callable[..., Made], *given: Any) -> Way:
            if key not in store:
                made = make(model, *given)
                windows = lp.perplexity(made.model, judged, description=key).windows
                kept = {"windows": windows.tolist(), "seconds": made.seconds, "removed": list(made.removed)}
                store.add(key, {**kept, "steps": made.steps})
            row = store[key]
            criterion, state, *_ = key.split()
            return Way(
                criterion, state, tuple(row["removed"]), np.array(row["windows"]), row["seconds"], 0, row["steps"]
            )

        dense = once("dense whole", lambda model: Made(model, (), 0.0))
        oracle = once("oracle cut", cut, learnt.ids[: -(-SCORED // learnt.ids.shape[1])], "oracle", remove)
        ways = [oracle]
        few = replace(learnt, ids=learnt.ids[: -(-CHOSEN_ON // learnt.ids.shape[1])])
        for criterion in (*CRITERIA, MENDED):
            chosen = once(f"{criterion} cut", cut, few, criterion, remove)
            mended = after(chosen, once(f"{criterion} mended", mend, chosen.removed, learnt))
            ways += [chosen, mended]
            for times in TIMES if criterion == HEALED else ():
                left = times * oracle.seconds - mended.seconds
                if left > 0:
                    healed = once(f"{criterion} healed {times:g}", heal, mended.removed, learnt, left)
                    ways.append(replace(after(mended, healed), times=times))
    return GoalsOnOneText(dense.windows, *origins, tuple(ways))


@dataclass(frozen=True)
class Made:
    model: PreTrainedModel
    removed: tuple[int, ...]
    seconds: float
    steps: int = 0


def after(before: Way, way: Way) -> Way:
    return replace(way, seconds=before.seconds + way.seconds)


def cut(model: PreTrainedModel, batch: lp.TokenBatch | torch.Tensor, criterion: str, remove: int) -> Made:
    how: dict[str, Any] = {"criterion": criterion}
    if criterion == MENDED:
        how = {"criterion": "best", "mend": True}
    before = time.process_time()
    plan = lp.rank(model, batch, remove=remove, **how).plan(remove)
    return Made(lp.remove_layers(model, plan), plan.remove, time.process_time() - before)


def mend(model: PreTrainedModel, removed: tuple[int, ...], learnt: lp.TokenBatch) -> Made:
    before = time.process_time()
    return Made(lp.mend(model, removed, learnt), removed, time.process_time() - before)


def heal(model: PreTrainedModel, removed: tuple[int, ...], learnt: lp.TokenBatch, seconds: float) -> Made:
    """From the mended model on, for so many seconds."""
    student = lp.mend(model, removed, learnt)
    learnt = replace(learnt, ids=learnt.ids.reshape(-1, STEP))
    before = time.process_time()
    done = lp.heal(student, model, learnt, minutes=seconds / 60)
    return Made(done.model, removed, time.process_time() - before, done.report.steps)


def written() -> dict[str, str]:
    results = GoalsOnOneText.all(HERE)
    parts = {"setting": settings, "goals": goals, "states": states, "texts": texts}
    return {name: part(results) for name, part in parts.items()} | {
        f"time-{by}": span(
            w.seconds / r.oracle.seconds for r in results for w in r.ways if (w.criterion, w.state) == (by, "cut")
        )
        for by in (*CRITERIA, MENDED)
    }


def _name(result: GoalsOnOneText) -> str:
    return f"{result.measured_on.model.name}, {Path(result.calibrated_on.text).stem}"


def goals(results: list[GoalsOnOneText]) -> str:
    rows = []
    for r in results:
        for w in r.ways:
            over, goal = ("—", "—") if w is r.oracle else (ratio(w.windows - r.oracle.windows), GOALS[w.state])
            by, layers, spent = f"`{w.criterion}`", runs(w.removed), w.seconds / r.oracle.seconds
            rows.append((_name(r), by, layers, w.state, w.steps or "—", ratio(w.windows), over, goal, spent))
    head = ("model, learnt from", "by", "removed", "", "steps", "perplexity", "/ oracle's", "goal", "time / oracle's")
    return table(head, rows)


def states(results: list[GoalsOnOneText]) -> str:
    """A row a state; healing counts where it ends in the oracle's own time."""
    rows: list[tuple[object, ...]] = []
    for state, goal in GOALS.items():
        found = [(w, r.oracle) for r in results for w in r.ways[1:] if w.state == state and w.times in (0, 1)]
        over = [float(np.exp((w.windows - oracle.windows).mean())) for w, oracle in found]
        better = sum(told(w, oracle) == "better" for w, oracle in found)
        rows.append((state, len(found), span(over), better, goal, sum(x <= goal for x in over)))
    return table(("", "removals", "perplexity / oracle's", "better than the oracle", "goal", "goal met"), rows)


def texts(results: list[GoalsOnOneText]) -> str:
    """Mended over cut, the same layers gone, by the text that mended."""
    rows: list[tuple[object, ...]] = []
    for r in results:
        cut, mended = ({w.criterion: w for w in r.ways[1:] if w.state == state} for state in ("cut", "mended"))
        over = [float(np.exp((mended[by].windows - cut[by].windows).mean())) for by in cut]
        words = " or ".join(sorted({told(mended[by], cut[by]) for by in cut}))
        rows.append((Path(r.calibrated_on.text).stem, span(over), words))
    return table(("mended on", "perplexity, mended / cut", ""), rows)


if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
