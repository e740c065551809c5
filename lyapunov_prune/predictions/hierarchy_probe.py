"""What changing one layer at a time has done to the hidden state, the logits and the probabilities."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import ROWS, MeasuredOn, ModelIdentity, Result
from lyapunov_prune.results.wording import bars


@dataclass(frozen=True)
class HierarchyProbe(Result):
    """Effect of changing one layer on `h → z = W_lm norm(h) → p = softmax(z/T)` at every decoding step.

    Arrays are (len(what), L, steps) float64, means over prompts. `what` lists what was changed: the whole layer, its
    attention or its MLP. `h` is the output of the changed layer, or of the changed sublayer before the other one runs
    (`read_at`); everything before it is dense. The final norm (skipped without `final_norm`) and the head are applied
    to `h` directly. With `Δ` the change of h or z, `d = Δz/T` and `q` the changed probabilities:

    - `hidden`, `logit`, `probability`: `1 − cos` between the dense and the changed h, z, p;
    - `hidden_parallel`, `hidden_orthogonal`, and the same for `logit`: `‖Δ∥‖/‖v‖` and `‖Δ⊥‖/‖v‖` with v = h or z;
    - `hidden_estimate`, `logit_estimate`: `‖Δ⊥‖²/(2‖v‖²)`; `probability_estimate`: `Var_r(d)/2`, `r_i = p_i²/‖p‖²`;
    - `kl = KL(p‖q)`, `reverse_kl = KL(q‖p)`, in nats, and `kl_estimate = Var_p(d)/2`;
    - `range_bound = max d − min d` and `variance_bound = (1/2 + 2c/9) Var_p(d)`, upper bounds of `kl` proven in
      `lean/`; the second is NaN unless `c = max |d − E_p d| ≤ 1` for every prompt. `deviation` is the largest c over
      prompts;
    - `uniform_variance`: variance of d over the vocabulary with equal weights (Figure 19);
    - `hidden_bound`, `logit_bound`, `probability_bound`: upper bounds of the angles, derived in docs/remainders.md but
      not proven in Lean. The first two are NaN unless `‖Δ∥‖ < ‖v‖` for every prompt; the third uses `Var_r(d)` and
      `deviation_r`, the largest `|d − E_r d|` over prompts. `derived` angles were compared with them, and `exceeded` of
      them were larger.

    All are NaN where a layer has no such sublayer, or where the change makes the logits infinite or NaN.

    Source: Demystifying When Pruning Works via Representation Hierarchies, §5 and §6, which reads h after the sublayer.
    """

    what: tuple[str, ...]
    compressed: ModelIdentity | None  # None: the layer or sublayer is left out
    hidden: np.ndarray
    hidden_estimate: np.ndarray
    hidden_parallel: np.ndarray
    hidden_orthogonal: np.ndarray
    logit: np.ndarray
    logit_estimate: np.ndarray
    logit_parallel: np.ndarray
    logit_orthogonal: np.ndarray
    probability: np.ndarray
    probability_estimate: np.ndarray
    kl: np.ndarray
    reverse_kl: np.ndarray
    kl_estimate: np.ndarray
    range_bound: np.ndarray
    variance_bound: np.ndarray
    deviation: np.ndarray
    deviation_r: np.ndarray
    uniform_variance: np.ndarray
    hidden_bound: np.ndarray
    logit_bound: np.ndarray
    probability_bound: np.ndarray
    temperature: float
    checked: int  # numbers compared with a bound
    violations: tuple[BoundCheck, ...]
    derived: int
    exceeded: int
    measured_on: MeasuredOn
    beside: ModelIdentity | None = None  # a model with fewer layers, which is not probed layer by layer
    read_at: str = "layer"
    final_norm: bool = True

    def to_frame(self) -> pd.DataFrame:
        """One row per layer, `what` and step."""
        parts, layers, steps = self.kl.shape
        layer, part, step = (x.ravel() for x in np.meshgrid(range(layers), range(parts), range(steps), indexing="ij"))
        frame = pd.DataFrame({"layer": layer, "what": np.array(self.what)[part], "step": step})
        arrays = [f.name for f in fields(self) if f.type == "np.ndarray"]
        return frame.assign(**{name: getattr(self, name)[part, layer, step] for name in arrays})

    def by_layer(self) -> pd.DataFrame:
        """Means over steps, one row per layer and `what`; `within` is the share of steps with `c ≤ 1`.

        The mean is NaN if it is NaN at one step.
        """
        frame = self.to_frame().assign(within=lambda f: f.variance_bound.notna().astype(float))
        return frame.drop(columns="step").groupby(["layer", "what"], sort=False).mean(skipna=False).reset_index()

    def summary(self) -> pd.DataFrame:
        spaces = ["hidden", "logit", "probability"]
        kl = ["kl", "kl_estimate", "reverse_kl", "variance_bound", "range_bound", "within"]
        return self.by_layer()[["layer", "what", *spaces, *(f"{name}_estimate" for name in spaces), *kl]]

    def brief(self) -> pd.DataFrame:
        """The changes that move the prediction most, the largest KL first."""
        return self.summary().sort_values("kl", ascending=False, kind="stable").head(ROWS)

    def answer(self) -> list[str]:
        """Which layer moves the prediction most and least, what the way to it does to a change, and the bounds."""
        means = self.by_layer()
        rows = means[(means.what == self.what[0]) & means.kl.notna()]
        change = "left out" if self.compressed is None else f"as in {self.compressed.name}"
        held = f"{self.checked} numbers were compared with proven bounds"
        lines = []
        if self.beside is not None:
            lines.append(
                f"{self.beside.name} has {self.beside.num_layers} of {self.measured_on.model.num_layers} layers: "
                "here layers of the dense model are left out by themselves; its own predictions follow."
            )
        lines += [
            f"{held}: {len(self.violations)} VIOLATED. A theorem does not fail: report it with hierarchy.json."
            if self.violations
            else f"{held}, none violated."
        ]
        if len(rows):
            most, least = rows.loc[rows.kl.idxmax()], rows.loc[rows.kl.idxmin()]
            lines += [
                f"One {self.what[0]} {change}: layer {most.layer} moves the prediction most (KL {most.kl:.3g} nats), "
                f"layer {least.layer} least ({least.kl:.3g}).",
                f"KL by layer: {bars(means[means.what == self.what[0]].kl.to_numpy())}",
                f"The median layer turns the state by {rows.hidden.median():.3g} (1 − cos), the logits by "
                f"{rows.logit.median():.3g}, the probabilities by {rows.probability.median():.3g}.",
                "Of one layer at a time: layers changed together may cost more than their sum.",
            ]
        return [*lines, self.measured_on.line()]

    def headline(self) -> str:
        change = "left out" if self.compressed is None else f"compressed as in {self.compressed.name}"
        if self.beside is not None:
            change = f"of {self.measured_on.model.name} left out, by itself"
        verdict = f"{len(self.violations)} of its bounds VIOLATED" if self.violations else "no bound violated"
        lines = [
            f"One layer {change}, over {self.kl.shape[-1]} decoding steps, T = {self.temperature:g}: "
            f"1 − cos in three spaces, KL in nats; {self.checked} numbers checked, {verdict}",
            f"State read where the {self.read_at} ends, logits with{'' if self.final_norm else 'out'} the final norm",
            f"{self.exceeded} of {self.derived} angles above the bounds derived in docs/remainders.md (not proven)",
            self.measured_on.line(),
        ]
        return "\n".join([*lines, *map(str, self.violations)])
