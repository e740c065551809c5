"""The result of a compression: its method, the amount for each matrix, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.checkpoints.cards import as_text
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.models.roles import LeftAlone, left_alone_lines
from lyapunov_prune.models.size import Size, told_bytes
from lyapunov_prune.registry import Choice
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import ROWS, MeasuredOn, Result
from lyapunov_prune.results.wording import bars

REPORT = "compression.json"  # beside the weights of a compressed checkpoint


@dataclass(frozen=True)
class CompressedMatrix:
    """The result for one matrix (m × n).

    `zeros` is the share of zero entries; `rank` and `bits` are what was kept, None for a method that does not set them.
    `weight_error = ‖W − Ŵ‖_F / ‖W‖_F`; `output_error = ‖(W − Ŵ) X‖_F / ‖W X‖_F` on the calibration inputs X, weighted
    if the method weighs tokens; None if no Gram matrix was collected. `tokens` counts the calibration tokens that the
    router sent to an expert; None for any other matrix. With fewer than n tokens, its statistics also use other tokens
    of the layer (`calibration.lending`).
    """

    name: str
    layer: int
    component: str
    rows: int
    columns: int
    amount: float
    zeros: float
    rank: int | None
    bits: float | None
    weight_error: float
    output_error: float | None
    tokens: int | None = None

    @property
    def lent(self) -> bool:
        return self.tokens is not None and self.tokens < self.columns


@dataclass(frozen=True)
class PackedSize:
    """The size of a checkpoint that stores matrices as integers, and its size with dense matrices."""

    format: str
    bytes: int
    dense_bytes: int
    weights: int  # their number in the model

    def line(self) -> str:
        return (
            f"packed integers ({self.format}): {Size(self.bytes, self.weights).told()}, "
            f"{self.bytes / self.dense_bytes:.3f} of the {told_bytes(self.dense_bytes)} that dense ones take; "
            "transformers unpacks them on the first forward, so without a kernel for them no time is saved"
        )


@dataclass(frozen=True)
class CompressionReport(Result):
    """A compression: its method, its allocation, and every matrix.

    `calibration` is the text that the method was calibrated on, None for one that uses weights alone;
    `allocation.measured_on` holds the texts that decided the amount of each matrix.
    """

    method: str
    pattern: tuple[int, ...] | None
    group_size: int | None
    allocation: Allocation
    matrices: tuple[CompressedMatrix, ...]
    calibration: MeasuredOn | None
    symmetric: bool = False  # grids around 0, without a zero point
    weighted: bool = False  # calibration tokens, by the gradient at each matrix's output
    correction: float = 0.0  # toward the outputs of the dense model, the α of `second_order.SecondOrder`
    packed: PackedSize | None = None  # integers; None: dense matrices
    left_alone: tuple[LeftAlone, ...] = ()  # weights inside the layers that no method compresses

    def about(self) -> str:
        """The description for the model card."""
        calibration = self.calibration.line() if self.calibration else "none, the method looks at weights alone"
        allocation = "".join(f"\n\nAllocation: by {as_text(on.line())}." for on in self.allocation.measured_on)
        schedule = self.allocation.schedule
        told = [_told(self.method, METHODS[self.method])]
        told += [_told(schedule, SCHEDULES[schedule])] if schedule in SCHEDULES else []  # a file may name another
        return (
            f"{as_text(self.headline())}. The model has not been trained afterwards. `{REPORT}` lists every matrix.\n\n"
            f"{as_text('; '.join(told))}.\n\n"
            f"Calibration: {as_text(calibration)}.{allocation}"
        )

    @property
    def saw(self) -> tuple[MeasuredOn, ...]:
        """The texts that influenced the result."""
        return self.allocation.measured_on + ((self.calibration,) if self.calibration else ())

    @property
    def ranks(self) -> dict[str, int | None]:
        """The rank by matrix name; None for a matrix that is not changed or not cut to a rank."""
        return {m.name: m.rank for m in self.matrices}

    @property
    def zeros(self) -> float:
        """Share of the entries of all matrices that are zero."""
        return float(np.average([m.zeros for m in self.matrices], weights=self._sizes()))

    def _sizes(self) -> list[int]:
        return [m.rows * m.columns for m in self.matrices]

    def to_frame(self) -> pd.DataFrame:
        """One row per matrix."""
        frame = pd.DataFrame([vars(m) for m in self.matrices])
        return frame.dropna(axis=1, how="all")

    def summary(self) -> pd.DataFrame:
        """One row per layer: means weighted by entries, errors as root mean squares."""
        frame = self.to_frame().assign(size=self._sizes())
        rows = []
        for layer, part in frame.groupby("layer"):
            row = {"layer": layer, self.allocation.unit: np.average(part["amount"], weights=part["size"])}
            row["zeros"] = np.average(part["zeros"], weights=part["size"])
            for error in ("weight_error", "output_error"):
                if error in part:
                    row[error] = float(np.sqrt((part[error] ** 2).mean()))
            rows.append(row)
        return pd.DataFrame(rows)

    def brief(self) -> pd.DataFrame:
        """The layers with the largest error, the largest first."""
        shown = self.summary()
        return shown.sort_values(_error_of(shown), ascending=False, kind="stable").head(ROWS)

    def answer(self) -> list[str]:
        shown = self.summary()
        error = _error_of(shown)
        what = "outputs, on the calibration text" if error == "output_error" else "weights"
        worst, least = shown.loc[shown[error].idxmax()], shown.loc[shown[error].idxmin()]
        lines = [
            f"{len(self.matrices)} matrices by {self.method}, {self.allocation.headline()}: {self.zeros:.1%} of the "
            "entries are zero.",
            f"Stored as {self.packed.line() if self.packed else 'dense matrices: neither memory nor time is saved'}.",
            f"Relative error of the {what}: most in layer {int(worst.layer)} ({worst[error]:.3g}), least in layer "
            f"{int(least.layer)} ({least[error]:.3g}).",
            f"By layer: {bars(shown[error].to_numpy(dtype=float))}" if len(shown) > 1 else "",
            self._lent(),
            *left_alone_lines(self.left_alone),
            "Errors of single matrices do not say what the model lost: score it with eval --against the dense one.",
        ]
        return [line for line in lines if line]

    def _lent(self) -> str:
        """A sentence on experts that were calibrated on too few tokens of their own; empty if there are none."""
        few = [m for m in self.matrices if m.lent]
        if not few:
            return ""
        fewest = min(few, key=lambda m: m.tokens or 0)
        return (
            f"{len(few)} matrices of experts were sent fewer tokens than they have inputs ({fewest.name}: "
            f"{fewest.tokens} for {fewest.columns}), and were calibrated on others of their layer too; more text helps "
            f"({REPORT}: tokens)."
        )

    def headline(self) -> str:
        extra = f" {self.pattern[0]}:{self.pattern[1]}" if self.pattern else ""
        extra += f", groups of {self.group_size}" if self.group_size else ""
        extra += ", symmetric" if self.symmetric else ""
        extra += ", tokens weighted" if self.weighted else ""
        extra += f", corrected by {self.correction:g}" if self.correction else ""
        stored = self.packed.line() if self.packed else "dense matrices: neither memory nor time is saved"
        return (
            f"{self.method}{extra}, {self.allocation.headline()}: {self.zeros:.1%} of the entries are zero. Stored as "
            f"{stored}"
        )


def _told(name: str, entry: type[Choice]) -> str:
    return f"{name}: {entry.help} ({entry.reference})"


def _error_of(shown: pd.DataFrame) -> str:
    """The column of `CompressionReport.summary` that tells the error: of the outputs where it was measured."""
    return "output_error" if "output_error" in shown and shown.output_error.notna().any() else "weight_error"
