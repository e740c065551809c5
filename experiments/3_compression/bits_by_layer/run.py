"""Bits by layer at equal bytes: by the measured divergence of each layer, by ρ, by A, at the ends, and alike.

    python experiments/3_compression/bits_by_layer/run.py [--model MODEL] [--text FILE]

`rtn` in groups of 64. Every schedule has the same mean at most; `uniform` spends what whole layers leave on layers
evenly apart. `bits-kl` goes by the divergence on half of the calibration text, and gives way to `uniform` where that
diverges less on the other half; the divergence reported is on other text.
Writes bits.json beside this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import lyapunov_prune as lp
from experiments.bits_kl import WIDTHS, RoundingCost, bits_kl, evenly, least_cost
from experiments.common import Model, Other, run_command, texts
from experiments.divergences import divergences, finals
from experiments.schedules import log_amplification, log_rho
from experiments.statements import ratio, short, table
from lyapunov_prune.allocation.allocation import DENSE, Allocation, Matrices
from lyapunov_prune.compression.methods.rtn import RoundToNearest
from lyapunov_prune.forward.reading import read
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
BUDGETS = (3.0, 4.5)
ENDS = 4.0**4  # how much more an error of the first or the last layer costs: about four bits
GROUP = 64


@dataclass(frozen=True)
class Shared:
    """One schedule at one budget: the width of each layer, and `KL(dense‖rounded)` of every window, nats a token."""

    schedule: str
    budget: float
    mean: float
    widths: tuple[int, ...]
    kl: tuple[float, ...]


@dataclass(frozen=True)
class BitsByLayer(Result):
    """What each schedule leaves of the prediction, on text that none of them saw."""

    rows: tuple[Shared, ...]
    costs: np.ndarray  # (layers × widths): the divergence of each layer rounded alone, on calibration text
    widths: tuple[int, ...]
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn


@dataclass(frozen=True)
class Known:
    """Costs that were measured, for more than one budget."""

    costs: np.ndarray
    measured: RoundingCost

    @property
    def measured_on(self) -> MeasuredOn:
        return self.measured.measured_on

    def __call__(self, widths: Sequence[int]) -> np.ndarray:
        return self.costs

    def together(self, allocations: Sequence[Allocation]) -> list[float]:
        return self.measured.together(allocations)


def main(
    model: Model = Model(),
    text: str = "builtin",
    unseen: Other = None,
    calibration_tokens: int = 2048,
    tokens: int = 4096,
    context: int = 256,
) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    sizes = {"calibration": calibration_tokens, "evaluation": tokens, "context": context}
    calibration, evaluation = texts(loaded, text, **sizes, unseen=unseen)
    dense = loaded.model
    profile = lp.measure_contraction(dense, calibration, seeds=range(2))
    cost = RoundingCost(read(loaded, calibration), RoundToNearest(GROUP), 1)
    known = Known(cost(WIDTHS), cost)
    reading = read(loaded, evaluation)
    states = list(finals(reading, dense))
    matrices = Matrices.of(dense)
    rows = []
    for budget in BUDGETS:
        chosen = [bits_kl(dense, budget, known), *by_weight(matrices, profile, budget)]
        for allocation in (*chosen, evenly(matrices, budget, WIDTHS)):
            small = lp.compress(dense, method="rtn", allocation=allocation, group_size=GROUP).model
            widths = tuple(int(bits) for bits in allocation.by_layer())
            kl = divergences(reading, states, list(finals(reading, small)))
            del small  # or two copies of the model are there while the next is made
            rows.append(Shared(allocation.schedule, budget, allocation.mean, widths, kl))
            print(allocation.schedule, budget, allocation.mean, np.mean(kl), widths, flush=True)
    found = BitsByLayer(tuple(rows), known.costs, WIDTHS, reading.measured_on(), known.measured_on)
    found.save(folder / "bits.json")


def by_weight(matrices: Matrices, profile: ContractionProfile, budget: float) -> list[Allocation]:
    """The widths of least `Σ_l w_l² 4^−b_l`, a dense layer at 0: `w` is ρ, A, or larger for the ends alone."""
    ends = np.zeros(matrices.model.num_layers)
    ends[[0, -1]] = np.log(ENDS) / 2
    logs = {"bits-rho": log_rho(profile), "bits-amplification": log_amplification(profile), "bits-ends": ends}
    noise = np.array([0.0 if bits == DENSE else 4.0**-bits for bits in WIDTHS])
    found = []
    for name, log in logs.items():
        cost = np.exp(2 * (log - log.max()))[:, None] * noise
        sizes = np.bincount(matrices.layers, matrices.sizes, len(cost))
        width = least_cost(cost, np.array(WIDTHS), sizes, budget)
        found.append(matrices.allocated(name, budget, width[matrices.layers].astype(np.float64), {}, unit="bits"))
    return found


def written(folder: Path = HERE) -> dict[str, str]:
    found = BitsByLayer.load(folder / "bits.json")
    lines: list[list[object]] = []
    for budget in BUDGETS:
        kl = {row.schedule: np.array(row.kl) for row in found.rows if row.budget == budget}
        for row in found.rows:
            if row.budget == budget:
                beside = None if row.schedule == "uniform" else ratio(np.log(kl[row.schedule] / kl["uniform"]))
                lines.append([short(budget), row.schedule, short(row.mean), float(kl[row.schedule].mean()), beside])
    head = ["bits at most", "schedule", "mean bits", "KL, nats a token", "/ uniform, geometric mean over windows"]
    cells = {f"{line[1]}, {line[0]} bits": str(line[4]) for line in lines if line[4] is not None}
    setting = f"{found.measured_on.line()}.\nCalibration: {found.calibrated_on.line()}.\n"
    return {"bits": table(head, lines), "setting": setting} | cells


if __name__ == "__main__":
    run_command(main, HERE / "bits.json", written)
