"""The result of `explain`: where the error comes from, and what each layer costs at the prediction."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.growth import ErrorGrowth, TwoPhases
from lyapunov_prune.bounds.matrix_errors import MatrixErrors
from lyapunov_prune.diagnosis.finding import Diagnosis, Finding
from lyapunov_prune.evaluation.perplexity import ratio_of
from lyapunov_prune.explaining.decomposition import PARTS, Decomposed
from lyapunov_prune.explaining.token_kinds import TokenKinds
from lyapunov_prune.results.axes import LayerNumbers, Loose, Per, PerBoundary, PerLayer
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, ROWS, MeasuredOn, ModelIdentity, Result
from lyapunov_prune.results.wording import number
from lyapunov_prune.results.worth import Ratio

EXPLANATION = "explanation.json"
_BY_SIZE = (
    "Made by shrink --size, which spent its bytes where they pay most. As a rule, one bit a weight more (the squared "
    "error of rounding falls to a quarter) leaves a quarter of the KL."
)
_NAMED = 3  # the most layers that are blamed
_TOLD = 2  # the most faults in the answer
_WORSE = 0.05  # nats by which the dense model may be worse before that is said


_Cost = Annotated[np.ndarray, Per("layer+2", least=-1e-9, finite=False)]  # embedding, layers, and final norm with head


@dataclass(frozen=True)
class Explanation(Decomposed, Result):
    """Where the error of `compressed` comes from, layer by layer, with the layer numbers of the dense model (L layers).

    The error after every layer is a sum of three parts; the fields from `size` to `rounding` are those of `Decomposed`.

    At the prediction, in nats per token: `kl` and `loss` of the compressed model, and `dense_loss`; for the embedding,
    every layer, and final norm and head, (L + 2,): `kl_only` and `loss_only` with this part alone compressed, `kl_but`
    and `loss_but` with all parts but this compressed. `rho` (L,) is that of a profile of the dense model, NaN without
    one. `settings` names the setting that differs between the two configs, empty if none does.

    `matrices` holds the errors of single matrices, those of the blamed layers (`blamed`) that differ; None if none
    does, or they cannot be read as numbers. `tokens` follows the error from the final state to the prediction, by kind
    of token and event. `diagnosis` holds what is broken in the compressed model, `file_size` the bytes of its files,
    None if they are not known, or `shrink --size` cannot make such a model, and `by_size` whether it made this one.
    `rise` (windows,) is by how much the loss of every window rises; None in files of older versions.
    """

    kept: LayerNumbers
    size: PerBoundary
    error: PerBoundary
    energy: Annotated[np.ndarray, Per(3, "layer")]
    along: Annotated[np.ndarray, Per(3, "layer", least=-np.inf)]
    passed: PerLayer
    off: PerLayer
    rounding: float
    kl: float
    loss: float
    dense_loss: float
    kl_only: _Cost
    kl_but: _Cost
    loss_only: _Cost
    loss_but: _Cost
    rho: Loose
    settings: str
    compressed: ModelIdentity
    measured_on: MeasuredOn  # the dense model
    matrices: MatrixErrors | None = None
    tokens: TokenKinds | None = None
    diagnosis: Diagnosis | None = None
    file_size: int | None = None
    rise: np.ndarray | None = None
    by_size: bool = False

    @property
    def differs(self) -> bool:
        """Whether the two models compute different results on this text."""
        return bool(self.error.any()) or self.kl > 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is broken in the compressed model, the worst first."""
        return () if self.diagnosis is None else self.diagnosis.findings

    def against_dense(self) -> Ratio:
        return ratio_of(np.array([self.loss - self.dense_loss]) if self.rise is None else self.rise)

    @property
    def growth(self) -> np.ndarray:
        """`‖g(h') − g(h)‖ / ‖e_k‖`, (L,); 0 if no error arrives."""
        return self._growth.factors

    @property
    def rho_of_error(self) -> np.ndarray:
        """ρ of this error, `growth² ‖h_k‖² / ‖h_{k+1}‖²`, as defined in a profile; NaN if no error arrives."""
        return np.where(self.error[:-1] > 0, self.growth**2 * self.size[:-1] / self.size[1:], np.nan)

    @property
    def gain(self) -> np.ndarray:
        """The KL saved by restoring this part alone: `kl − kl_but`, (L + 2,)."""
        return self.kl - self.kl_but

    @property
    def blamed(self) -> tuple[int, ...]:
        """The layers with the largest `gain`, the largest first."""
        return blamed_layers(self.gain)

    @property
    def interaction(self) -> np.ndarray:
        """`gain − kl_only`, (L + 2,): above zero if the other errors make this one worse, below if they hide it."""
        return self.gain - self.kl_only

    @property
    def composition(self) -> tuple[BoundCheck, ...]:
        """`trajectory_error_le` with the measured growth of the compressed layers."""
        return self._growth.composition()

    @property
    def phases(self) -> TwoPhases | None:
        """The bound in two phases on the relative error (estimate)."""
        return self._growth.phases()

    @property
    def _growth(self) -> ErrorGrowth:
        return ErrorGrowth(self.size, self.error, self.passed, self.energy[1], self.rounding)

    @property
    def names(self) -> list[str]:
        return ["embedding", *map(str, range(len(self.passed))), "head"]

    def to_frame(self) -> pd.DataFrame:
        """One row for the embedding, for every layer and for the head."""
        nothing = [np.nan]
        relative, parts = self.relative, self.parts
        columns = {name: np.array([np.nan, *part, np.nan]) for name, part in zip(PARTS, parts, strict=True)}
        columns["added"][0] = relative[0]
        return pd.DataFrame(
            {
                "layer": self.names,
                **columns,
                "error": [*relative, np.nan],
                "rho_of_error": [*nothing, *self.rho_of_error, *nothing],
                **({"rho": [*nothing, *self.rho, *nothing]} if np.isfinite(self.rho).any() else {}),
                "kl_only": self.kl_only,
                "kl_but": self.kl_but,
                "gain": self.gain,
                "interaction": self.interaction,
                "perplexity_only": np.exp(self.loss_only),
                "perplexity_but": np.exp(self.loss_but),
            }
        )

    def brief(self) -> pd.DataFrame:
        """The parts with the largest gain, the largest first."""
        order = np.argsort(-self.gain, kind="stable")[:ROWS]
        return self.to_frame().iloc[order]

    def answer(self) -> list[str]:
        if not self.differs:
            return ["Nothing differs: both models compute the same on this text.", self.measured_on.line()]
        event = self.tokens.event() if self.tokens is not None else ""
        more = len(self.findings) - _TOLD
        lines = [
            *self._swapped(),
            *(finding.line() for finding in self.findings[:_TOLD]),
            *([f"{more} more faults: see the table of the diagnosis."] if more > 0 else []),
            f"KL from the dense model {self.kl:.3g} nats a token in the mean{event and f', but {event}'}; "
            f"perplexity {number(np.exp(self.dense_loss))} → "
            f"{number(np.exp(self.loss))}{self.settings and f'; {self.settings}'}.",
            *self._blame(),
            _BY_SIZE if self._is_best_of_size else "",
            self._kind(),
        ]
        if not self.adds_up:
            lines.insert(0, self._sum())
        lines.append(self.diagnosis.storage if self.diagnosis is not None and not self.findings else self._sum())
        last = [*self._expected(), self.measured_on.line()]
        if self.findings and self.findings[0].remedy:
            last.insert(0, f"What to do: {self.findings[0].remedy}, or make it from DENSE anew.")
        return [*list(filter(None, lines))[: LINES - len(last)], *last]

    @property
    def _is_best_of_size(self) -> bool:
        return self.by_size and not self.findings

    def following(self) -> str:
        """DENSE anew if something is broken; else healing, as many bytes where they pay most, or a closer look.

        Of a file that `shrink --size` made: how fast it is if it is good, else one bit a weight more.
        """
        name, made = shlex.quote(self.measured_on.model.name), shlex.quote(self.compressed.name)
        if len(self.kept) < self.measured_on.model.num_layers and not self.findings:
            return f"heal {made} --teacher {name} -o healed"
        size, weights = self.file_size, self.measured_on.model.parameters
        if self._is_best_of_size:
            if self.against_dense().is_good:
                return f"eval {made} --against {name} --speed"
            size = None if size is None else size + weights // 8
        if size is not None and size < 2 * weights:
            return f"shrink {name} --size {size / 1e6:.4g}MB -o anew.gguf"
        if self.findings:
            return f"export {name} -o anew"
        return f"hierarchy {name} {made}" if self.differs else ""

    def _expected(self) -> list[str]:
        """What the next command can gain and how that was obtained, where it is known: healing, and bytes moved.

        Bits that move between parts of one size until each costs the same, at a quarter of the KL a bit, leave the
        geometric mean of their KLs in place of the arithmetic one (the allocation of bits at high rate).
        """
        command = self.following().partition(" ")[0]
        gone = [i + 1 for i in range(len(self.passed)) if i not in self.kept]
        if command == "heal" and self.kl > 0 and (best := max(gone, key=lambda i: float(np.nan_to_num(self.gain[i])))):
            return [
                f"Of the KL, {self.gain[best] / self.kl:.0%} goes with removed {_part(self.names[best])} put back "
                "alone (measured), the most of those removed; healing regains a part of it without the layer."
            ]
        alone = self.kl_only[self.kl_only > 0]
        if command != "shrink" or self.findings or self._is_best_of_size or len(alone) < 2:
            return []
        left = float(np.exp(np.log(alone).mean()) / alone.mean())
        return [
            f"In the same bytes, bits moved to where they cost most leave about {left:.0%} of the KL, as a rule "
            f"(a quarter a bit; from the KLs of the {len(alone)} parts alone)."
        ]

    def _swapped(self) -> list[str]:
        """A sentence if the dense model predicts worse than the compressed one, which training can explain."""
        coarser = self.diagnosis is not None and self.diagnosis.coarser
        if self.dense_loss <= self.loss + (0 if coarser else _WORSE):
            return []
        worse = f"DENSE predicts this text worse than FILE (loss {self.dense_loss:.4g} against {self.loss:.4g})"
        if coarser:
            return [f"{worse}, and is rounded more coarsely: the two models are given the wrong way round."]
        return [f"{worse}: are the two models the wrong way round, or was FILE trained further?"]

    def headline(self) -> str:
        last = self.composition[-1]
        return (
            f"{self.compressed.name} against {self.measured_on.model.name}: {len(self.kept)} of "
            f"{self.measured_on.model.num_layers} layers are there. After the last: error {last.error:.4g}, composed "
            f"estimate {last.bound:.4g} (trajectory_error_le, growth measured along this trajectory)\n"
            f"{self.measured_on.line()}"
        )

    def further(self) -> list[Result]:
        """Further tables, each with its own answer."""
        faults = self.diagnosis if len(self.findings) > 1 else None
        return [part for part in (faults, self.matrices, self.tokens) if part is not None]

    def _blame(self) -> list[str]:
        order = _most(self.gain)
        if not order:
            return ["No single layer is to blame: putting one back gains nothing."]
        named = ", ".join(f"{_part(self.names[i])} ({self.gain[i] / self.kl:.0%})" for i in order)
        first = order[0]
        together = float(np.nansum(self.kl_only))
        apart = f"{'more' if self.kl > together else 'less'}, by {abs(self.kl - together):.3g}"
        apart = "as much" if np.isclose(self.kl, together) else apart
        return [
            f"To blame most, by the share of the KL that putting it back alone saves: {named}.",
            f"With {_part(self.names[first])} put back, KL is {self.kl_but[first]:.3g} and perplexity "
            f"{number(np.exp(self.loss_but[first]))}; with it alone compressed, KL is {self.kl_only[first]:.3g}.",
            f"The KLs of each alone sum to {together:.3g}; all together cost {apart}.",
        ]

    def _kind(self) -> str:
        """A sentence on whether the error at the end was added by the layers or amplified on the way."""
        start, end = self.relative[[0, -1]]
        added, carried = float(self.parts[1].sum()), float(self.carried.sum())
        arrived = f"{start:.3g} from the embedding, " if start > 0 else ""
        way = f"{carried:.3g} by amplifying it" if carried > 0 else f"−{-carried:.3g} by damping it"
        most = "amplified" if carried > start + added else "added, not amplified"
        return f"Relative error {end:.3g} after the last layer: {arrived}{added:.3g} added, {way}; mostly {most}."

    def _sum(self) -> str:
        worst = int(np.argmax(self.off))
        told = f"{self.off[worst]:.2g} of the state at layer {worst}, rounding allows {self.rounding:.2g}"
        if self.adds_up:
            return f"Inherited, added and amplified add up to what leaves each layer, within {told}."
        return f"THE PARTS DO NOT ADD UP to what leaves the layers: off by {told}."


def _part(name: str) -> str:
    return f"layer {name}" if name.isdecimal() else f"the {name}"


def blamed_layers(gain: np.ndarray) -> tuple[int, ...]:
    """The layers with the largest `gain` (L + 2,) above zero, at most three."""
    return tuple(i - 1 for i in _most(gain) if 0 < i < len(gain) - 1)


def _most(gain: np.ndarray) -> list[int]:
    gain = np.nan_to_num(gain, nan=-np.inf)
    return [int(i) for i in np.argsort(-gain, kind="stable")[:_NAMED] if gain[i] > 0]
