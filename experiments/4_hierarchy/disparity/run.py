"""How far apart are the gradients of attentions and activations, and what would an order across types remove (Obs. 1)?

    python experiments/4_hierarchy/disparity/run.py [--model MODEL] [--text FILE]

`|∂loss/∂m|` of every branch, m = 1 where it is whole and 0 where its attention is gone or its activation is replaced,
on several disjoint groups of windows. Writes MODEL.json and MODEL.svg beside this file; what they say goes into
README.md by `make tables`.
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats
from transformers import PreTrainedModel

from experiments.common import Model, draw, read_text, run_command
from experiments.statements import bullets, interval, runs, short, signed, table
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.forward.hooks import run_through
from lyapunov_prune.forward.reading import read
from lyapunov_prune.joint.importance import measure_importance
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.decoder import wrap, wrap_any
from lyapunov_prune.report.drawing import COLOURS, depth_axis, log_axis, one_panel, svg
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
CONTEXT, GROUPS, WINDOWS = 256, 6, 8
REDUCTION = "mean-gate"
TAKEN = 8


@dataclass(frozen=True)
class Disparity(Result):
    """`|∂loss/∂m|` at m = 1 of each attention and each activation, (groups, L) each: the mean of a group's windows."""

    reduction: str
    windows: int  # a group
    attention: np.ndarray
    activation: np.ndarray
    measured_on: MeasuredOn

    @property
    def name(self) -> str:
        return self.measured_on.model.name

    @property
    def ratio(self) -> np.ndarray:
        """(groups,): the median attention over the median activation."""
        return np.median(self.attention, 1) / np.median(self.activation, 1)

    def headline(self) -> str:
        return f"{self.measured_on.line()}, {len(self.attention)} groups of {self.windows} windows; {self.reduction}"


def main(model: Model = Model(), text: str = "builtin") -> None:
    loaded = model.load()
    batch = read_text(loaded, text, GROUPS * WINDOWS * CONTEXT, CONTEXT)
    found = measure(loaded.model, batch)
    found.save(HERE / f"{found.name}.json")
    draw(HERE, {found.name: figure(found)})


def measure(model: PreTrainedModel, batch: TokenBatch) -> Disparity:
    reading = read(wrap(model), batch)
    student = Unmerged(wrap_any(model), REDUCTION, lambda: run_through(wrap_any(model), batch))
    groups = np.array_split(np.arange(len(batch)), GROUPS)
    worth = [measure_importance(student, batch.take(g.tolist())) for g in groups]
    return Disparity(
        reduction=REDUCTION,
        windows=len(groups[0]),
        attention=np.stack([w.attention for w in worth]),
        activation=np.stack([w.activation for w in worth]),
        measured_on=reading.measured_on(),
    )


def spread(values: np.ndarray) -> tuple[float, float, float]:
    """Geometric mean over groups and Student's 95 % interval."""
    logs = np.log(values)
    half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
    return float(np.exp(logs.mean())), float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))


def agreement(rows: np.ndarray) -> float:
    """Mean Spearman correlation of the layers' values over pairs of groups."""
    return float(np.mean([stats.spearmanr(a, b).statistic for a, b in combinations(rows, 2)]))


def figure(found: Disparity) -> str:
    drawn, axes = one_panel(6.5, 3.0)
    layers = np.arange(found.attention.shape[1])
    for name, colour in (("attention", COLOURS["rho"]), ("activation", COLOURS["bi"])):
        rows = getattr(found, name)
        axes.errorbar(
            layers,
            np.median(rows, 0),
            np.abs(np.stack([rows.min(0), rows.max(0)]) - np.median(rows, 0)),
            fmt="o-",
            markersize=3,
            capsize=2,
            color=colour,
            label=name,
        )
    log_axis(axes, "y")
    axes.set_ylabel("|∂loss/∂m|, nats a token")
    depth_axis(axes, len(layers))
    axes.set_xlabel("layer")
    axes.legend(fontsize=8)
    return svg(drawn)


def written() -> dict[str, str]:
    results = [Disparity.load(path) for path in sorted(HERE.glob("*.json"))]
    return {
        "setting": bullets(*(r.headline() for r in results)),
        "disparity": disparity(results),
        "order": order(results),
    }


def disparity(results: list[Disparity]) -> str:
    head = ("model", "attention, median", "activation, median", "attention / activation", "largest / least of a type")
    rows = []
    for found in results:
        a, g = found.attention.mean(0), found.activation.mean(0)
        within = f"attention {short(a.max() / a.min())}, activation {short(g.max() / g.min())}"
        medians = float(np.median(a)), float(np.median(g))
        rows.append((found.name, *medians, interval(*spread(found.ratio)), within))
    return table(head, rows)


def order(results: list[Disparity]) -> str:
    """How well orders from two groups of windows agree, and the first that an order across types would take."""
    head = ("model", "orders agree, attentions", "activations", f"first {TAKEN}: attentions", "activations")
    rows = []
    for found in results:
        worth = np.concatenate([found.attention.mean(0), found.activation.mean(0)])
        count = found.attention.shape[1]
        taken = np.argsort(worth, kind="stable")[:TAKEN]
        layers = runs(taken[taken < count].tolist()), runs((taken[taken >= count] - count).tolist())
        rows.append((found.name, signed(agreement(found.attention)), signed(agreement(found.activation)), *layers))
    return table(head, rows)


if __name__ == "__main__":
    run_command(main, HERE / "{model}.json", written)
