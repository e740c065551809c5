"""Which matrices and layers tolerate compression: the regret of every change, and its possible predictors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from lyapunov_prune.arguments import Count, Positive
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.decoder import InMemory, takes_model
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.results.frames import columns, pd
from lyapunov_prune.results.result import LINES, MeasuredOn, Result
from lyapunov_prune.results.wording import bars
from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.compressor import Compressor
from lyapunov_prune.sensitivity.study import StudyRequest
from lyapunov_prune.sensitivity.sweep import Outcome, Sweep
from lyapunov_prune.sensitivity.table import STUDIES

DEFAULT_STUDIES = ("group", "layer", "removal")


@dataclass(frozen=True)
class Effect:
    """The result of one change.

    `windows` holds the mean loss of each window in nats, `drift` is `1 − CKA` of the inputs of the head, `saved` the
    saved share of the multiplications of the layers' matrices.
    """

    study: str
    label: str
    layer: int | None
    component: str | None
    method: str | None
    sparsity: float | None
    rank: int | None
    saved: float
    windows: np.ndarray
    drift: float
    bits: float | None = None


@dataclass(frozen=True)
class Sensitivity(Result):
    """Regret of every change: `exp(nll) − exp(nll of the dense model)`; degradation is the ratio of the two.

    `scores` holds possible predictors, one value per layer: `|rho - 1|`, `bi`, and `amplification`, the downstream `A_l
    = Π_{k > l} ρ_k`. Empty without a profile.
    """

    compression: Compression
    limit: float
    dense: np.ndarray  # mean loss of each window, in nats
    effects: tuple[Effect, ...]
    scores: dict[str, np.ndarray]
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn | None

    @property
    def perplexity(self) -> float:
        """Perplexity of the dense model."""
        return float(np.exp(self.dense.mean()))

    @property
    def threshold(self) -> float | None:
        """`s*`: the highest sparsity of layer 0 by Wanda that keeps the regret below `limit`.

        None when the study `threshold` was not run, or no sparsity keeps the regret below the limit.
        """
        rows = self.of("threshold")
        return float(below.max()) if len(below := rows.sparsity[rows.regret < self.limit]) else None

    def of(self, study: str) -> pd.DataFrame:
        """The rows of one study, in the order they were requested."""
        return self._frame[self._frame.study == study].reset_index(drop=True)

    def to_frame(self) -> pd.DataFrame:
        return self._frame.copy()

    @cached_property
    def _frame(self) -> pd.DataFrame:
        rows = []
        for e in self.effects:
            low, high = interval_of(e.windows - self.dense)
            with np.errstate(over="ignore"):  # a broken model may have infinite perplexity
                value, ratio = float(np.exp(e.windows.mean())), float(np.exp((e.windows - self.dense).mean()))
            rows.append(
                {
                    **columns(e, "study", "label", "layer", "component", "sparsity", "rank", "bits", "saved"),
                    "perplexity": value,
                    "regret": value - self.perplexity,
                    "degradation": ratio,
                    "low": low,
                    "high": high,
                    "drift": e.drift,
                }
            )
        return pd.DataFrame(rows).astype({"layer": "Int64", "rank": "Int64", "bits": "Float64"})

    def summary(self) -> pd.DataFrame:
        """One row per study."""
        rows = []
        for study, frame in self._frame.groupby("study", sort=False):
            order = frame.regret.fillna(np.inf)  # NaN is a broken model
            most, least = frame.loc[order.idxmax()], frame.loc[order.idxmin()]
            rows.append(
                {
                    "study": study,
                    "changes": len(frame),
                    "median regret": frame.regret.median(),
                    "least": least.regret,
                    "of": least.label,
                    "most": most.regret,
                    "of ": most.label,
                }
            )
        return pd.DataFrame(rows)

    def correlations(self) -> pd.DataFrame:
        """Spearman's rank correlation over layers between measurements and possible predictors."""
        frame = self._frame.dropna(subset="layer")
        pairs = [
            ("removal", "regret", ("|rho - 1|", "bi")),
            ("layer", "regret", ("amplification", "|rho - 1|", "bi")),
            ("layer", "drift", ("amplification", "|rho - 1|")),
            ("group", "regret", ("amplification",)),
            ("group", "drift", ("amplification",)),
        ]
        rows = []
        for study, measured, names in pairs:
            # Average groups over the components of a layer, because the claim is about layers.
            values = frame[frame.study == study].groupby("layer")[measured].mean().dropna()
            for name in names:
                if name not in self.scores or len(values) < 3:
                    continue
                against = self.scores[name][values.index.to_numpy(dtype=int)]
                if min(values.nunique(), len(np.unique(against))) > 1:  # a constant has no ranks
                    correlation = stats.spearmanr(values, against)
                    rows.append((f"{measured}, {study}", name, correlation.statistic, correlation.pvalue, len(values)))
        return pd.DataFrame(rows, columns=["measured", "against", "spearman", "p", "layers"])

    def _star(self) -> list[str]:
        if not (frame := self.of("threshold")).size:
            return []
        star = f"below {frame.sparsity.min():g}" if self.threshold is None else f"{self.threshold:g}"
        return [f"Catastrophe threshold s* = {star} (Wanda on layer 0, regret below {self.limit:g})"]

    def answer(self) -> list[str]:
        """For every study the most and the least harmful change, then what predicts the harm."""
        lines = [f"Dense perplexity {self.perplexity:.4g}; regret is what a change adds to it ({self.compression})."]
        for row in self.summary().itertuples():
            lines.append(
                f"{row.study}: most at {row[7]} (+{row.most:.3g}), least at {row.of} ({row.least:+.3g}), median "
                f"{row[3]:+.3g} of {row.changes} changes."
            )
        lines += self._star()
        removed = self.of("removal")
        if len(removed) > 1:
            lines.append(f"Regret by layer removed: {bars(removed.regret.to_numpy(dtype=float))}")
        told = self.correlations()
        if len(told):
            best = told.loc[told.spearman.abs().idxmax()]
            lines.append(
                f"Of the scores, {best.against} goes best with {best.measured} (rank correlation {best.spearman:+.2f} "
                f"over {best.layers} layers of one model: a hint)."
            )
        return [*lines[: LINES - 1], self.measured_on.line()]

    def headline(self) -> str:
        lines = [f"Sensitivity ({self.compression}): dense perplexity {self.perplexity:.4g}", self.measured_on.line()]
        lines += self._star()
        lines += [
            f"Spearman of {row.measured} with {row.against}: {row.spearman:+.2f} (p = {row.p:.2g}, {row.layers} layers)"
            for row in self.correlations().itertuples()
        ]
        return "\n".join(lines)


@takes_model
def measure_sensitivity(
    model: InMemory,
    batch: Readable,
    *,
    studies: Sequence[str] = DEFAULT_STUDIES,
    method: str = "magnitude",
    sparsity: float = 0.5,
    rank: int | None = None,
    bits: float | None = None,
    limit: Positive = 10.0,
    calibration: Readable | None = None,
    profile: LayerProfile | None = None,
    folder: str | Path | None = None,
    batch_size: Count = 1,
) -> Sensitivity:
    """Change one thing after another and measure the loss on `batch`.

    `studies` are names of `table.STUDIES`, which says what each changes. All except `removal` use `method`, `sparsity`
    and `rank` unless they set their own; a low-rank method keeps `rank`, or by default the rank that follows from
    `sparsity`; one that rounds keeps `bits` (4 if not given) and goes from 8 to 2 bits in place of rising sparsities.
    Each change is applied to the dense model and calibrated on the inputs there.

    `calibration` is the text on which methods see inputs, `profile` is compared with the regret; neither may share text
    with `batch`. Jobs are kept in `folder` (see `Store`), and none is repeated by a later run. Structural sensitivity,
    §5 and §6.1.

    Raises LyapunovPruneError for an unknown study or method, overlapping text, a missing calibration, or a profile of
    another model.
    """
    base = Compression(method, float(sparsity), rank, bits)
    for study in studies or ("",):
        STUDIES[study]  # raises for an unknown one
    reading = read(model, batch)
    if calibration is not None:
        calibration = read(model, calibration)
        require_disjoint(calibration.batch, reading.batch)
    require_unseen(reading.model, reading.batch)
    if profile is not None:
        if reading.batch.shared_with(profile.measured_on):
            raise LyapunovPruneError("the profile was measured on the tokens of the regret; give it other text")
        model.identity.require(profile.measured_on.model, "the profile")
    compressor = Compressor(reading.model, calibration)
    needing = method if METHODS[method].needs != "nothing" else "wanda" if "threshold" in studies else None
    if calibration is None and needing:
        raise LyapunovPruneError(f"{needing} needs calibration text; give some, or leave out the study threshold")
    also = {"calibration": None if calibration is None else calibration.batch.text_hash}
    outcomes: dict[str, Outcome] = {}
    pairs: list[tuple[Change, Outcome]] = []
    with Sweep(model, reading, folder=folder, batch_size=batch_size, also=also) as sweep:

        def measured(changes: Sequence[Change], study: str) -> dict[str, float]:
            outcomes.update(sweep.run(compressor.jobs(changes), study))
            return {key: float(o.windows.mean()) for key, o in outcomes.items()}

        asked = StudyRequest(compressor.projections, base)
        for study in sorted(dict.fromkeys(studies), key=list(STUDIES).index):
            made = STUDIES.make(study)
            if made.after_groups:
                asked = replace(asked, losses=measured(STUDIES.make("group").changes(asked), "group"))
            changes = made.changes(asked)
            while any(change.key not in outcomes for change in changes):
                asked = replace(asked, losses=measured(changes, study))
                changes = made.changes(asked)
            pairs += [(change, outcomes[change.key]) for change in changes]
        dense = sweep.dense
    shapes = {p: p.weight(reading.model).shape for p in compressor.projections}
    return Sensitivity(
        compression=base,
        limit=limit,
        dense=dense,
        effects=tuple(_effect(change, outcome, shapes) for change, outcome in pairs),
        scores={} if profile is None else _scores(profile),
        measured_on=sweep.measured_on,
        calibrated_on=None if calibration is None else calibration.measured_on(),
    )


def _effect(change: Change, outcome: Outcome, shapes: Mapping[Projection, torch.Size]) -> Effect:
    c = change.compression
    if c is None:
        saved: float = sum(shape.numel() for p, shape in shapes.items() if p.layer in change.remove)
    else:
        saved = sum(shapes[p].numel() - c.kept(shapes[p]) for p in change.matrices)
    return Effect(
        study=change.study,
        label=change.label,
        layer=change.layer,
        component=change.component,
        method=c.method if c else None,
        sparsity=c.sparsity if c else None,
        rank=c.rank if c else None,
        saved=saved / sum(shape.numel() for shape in shapes.values()),
        windows=outcome.windows,
        drift=outcome.drift,
        bits=c.bits if c else None,
    )


def _scores(profile: LayerProfile) -> dict[str, np.ndarray]:
    contraction = profile.contraction
    return {
        "|rho - 1|": np.abs(contraction.rho - 1),
        "bi": profile.influence.influence,
        "amplification": contraction.downstream_amplification,
    }
