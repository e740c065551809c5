"""Does the amplification by later layers predict how far a compressed component moves the final state?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args

import numpy as np
from scipy import stats

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.profiles.contraction_profile import ContractionProfile, Pooling
from lyapunov_prune.profiles.propagation import RESAMPLES, drawn_windows
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.sensitivity.changes import Compression
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

PAPER = -0.44  # GPT-2 Small, 72 groups, p < 1e-4 (§6.6)


_ByPooling = Annotated[dict[str, np.ndarray], Per("layer", finite=False)]


@dataclass(frozen=True)
class AmplificationDrift(Result):
    """Drift of every group (a component of one layer, compressed alone), with ρ and A of its layer. Float64.

    `drift` is `1 − CKA` of the inputs of the head, `rho` is ρ_l and `amplification` `A_l = Π_{k > l} ρ_k`, each by
    pooling, (L,). A group whose states were not finite has a drift of NaN and is left out of the correlations.
    """

    compression: Compression
    layers: Annotated[tuple[int, ...], Per("group", below="layer")]  # layer of each group
    components: tuple[str, ...]
    drift: Annotated[np.ndarray, Per("group", least=-np.inf, finite=False)]  # (groups,)
    rho: _ByPooling
    amplification: _ByPooling
    measured_on: MeasuredOn
    profiled_on: MeasuredOn

    def to_frame(self) -> pd.DataFrame:
        """Spearman's rank correlation of the drift with A and with ρ, for both poolings.

        Positive: groups before layers that amplify more drift more, as expected if an error reaches the end scaled by
        A. Negative: they drift less, so the initial size of an error matters more than its amplification.

        All groups of a layer share one A, so inference is over layers: `low` and `high` are the 95 % percentile
        bootstrap over layers, `p` is the share of permutations of A over layers with at least this correlation.
        `p_groups` treats groups as independent, as the paper does.
        """
        rows = []
        for name, scores in (("A", self.amplification), ("rho", self.rho)):
            for pooling, values in scores.items():
                rows.append({"drift with": name, "pooling": pooling, **self._correlation(values)})
        return pd.DataFrame(rows)

    def headline(self) -> str:
        left = int((~np.isfinite(self.drift)).sum())
        return (
            f"Drift (1 − CKA) of {len(self.drift)} groups in {len(set(self.layers))} layers, {self.compression}"
            f"{f'; {left} of NaN left out' if left else ''}\n{self.measured_on.line()}\n"
            f"rho: {self.profiled_on.line()}\n"
            "A = Π of the later rho. Spearman's sign: + where the later layers amplify, drift is larger; − smaller. "
            f"The paper: {PAPER} (GPT-2 Small, 72 groups)"
        )

    def _correlation(self, values: np.ndarray) -> dict[str, float]:
        layers = np.array(self.layers)
        kept = np.isfinite(self.drift) & np.isfinite(values[layers])
        layers, drift, against = layers[kept], self.drift[kept], values[layers[kept]]
        clusters, member = np.unique(layers, return_inverse=True)
        nothing = dict.fromkeys(("spearman", "low", "high", "p", "p_groups"), np.nan)
        if len(clusters) < 3 or min(len(np.unique(drift)), len(np.unique(against))) < 2:
            return {**nothing, "groups": len(drift), "layers": len(clusters)}
        whole = stats.spearmanr(against, drift)
        rng = np.random.default_rng(0)
        drawn = weighted_spearman(against, drift, drawn_windows(len(clusters), rng)[:, member])
        shuffled = rng.permuted(np.tile(values[clusters], (RESAMPLES, 1)), axis=1)[:, member]
        chance = _pearson(stats.rankdata(shuffled, axis=1), stats.rankdata(drift), np.ones((1, len(drift))))
        low, high = np.nanquantile(drawn, [0.025, 0.975])
        as_much = (np.abs(chance) >= np.abs(whole.statistic) - 1e-12).sum()
        return {
            "spearman": whole.statistic,
            "low": low,
            "high": high,
            "p": (1 + as_much) / (1 + RESAMPLES),
            "p_groups": whole.pvalue,
            "groups": len(drift),
            "layers": len(clusters),
        }


@checked
def amplification_drift(found: Sensitivity, contraction: ContractionProfile) -> AmplificationDrift:
    """Drift of every group of `found` with ρ and A of its layer (structural sensitivity, §6.6).

    The paper reports −0.44 (p < 1e-4) for the correlation of A with the drift caused by compressing one component of
    GPT-2 Small, and none for ρ alone; it states neither the pooling nor the sign of the drift. By "errors scale
    downstream by the product of later ρ" the correlation of A with `1 − CKA` would be positive, and with CKA itself
    negative.

    Raises LyapunovPruneError without the study `group`, for results of two models, for a profile measured on the text
    of the drift, and for a profile below the rounding floor.
    """
    groups = found.of("group")
    found.measured_on.model.require(contraction.measured_on.model, "the profile")
    same = contraction.measured_on.text_hash == found.measured_on.text_hash
    if groups.empty or same:
        what = "the profile was measured on the tokens of the drift; give it other text"
        raise LyapunovPruneError("drift by group needs the study group; measure it" if groups.empty else what)
    contraction.require_above_floor()
    by_pooling = {pooling: contraction.pooled(pooling) for pooling in get_args(Pooling)}
    return AmplificationDrift(
        compression=found.compression,
        layers=tuple(int(layer) for layer in groups.layer),
        components=tuple(groups.component),
        drift=groups.drift.to_numpy(dtype=float),
        rho={pooling: profile.rho for pooling, profile in by_pooling.items()},
        amplification={pooling: profile.downstream_amplification for pooling, profile in by_pooling.items()},
        measured_on=found.measured_on,
        profiled_on=contraction.measured_on,
    )


def weighted_spearman(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Spearman's correlation of samples in which value i of `x` and `y` (n,) occurs `counts[r, i]` times: (R,).

    NaN for a sample in which `x` or `y` is constant.
    """
    return _pearson(_ranks(x, counts), _ranks(y, counts), counts)


def _ranks(x: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The mean rank of every value, repeated as counted, (R, n)."""
    values, place = np.unique(x, return_inverse=True)
    many = counts.astype(float) @ (place[:, None] == np.arange(len(values))).astype(float)
    return (np.cumsum(many, axis=1) - many / 2)[:, place]


def _pearson(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    shares = weights / weights.sum(1, keepdims=True)
    x = x - (shares * x).sum(1, keepdims=True)
    y = y - (shares * y).sum(1, keepdims=True)
    size = np.sqrt((shares * x**2).sum(1) * (shares * y**2).sum(1))
    return np.divide((shares * x * y).sum(1), size, out=np.full(size.shape, np.nan), where=size > 0)
