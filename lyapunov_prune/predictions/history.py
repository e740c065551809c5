"""Direct error and diverged history: a compressed model reads the dense model's text, and its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch

from lyapunov_prune.arguments import Count, Positive
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.decoding import greedy_text
from lyapunov_prune.forward.hooks import require_finite
from lyapunov_prune.forward.logits import last_states, require_one_vocabulary
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import lift, require_numbers
from lyapunov_prune.models.decoder import InMemory, runs_models
from lyapunov_prune.predictions.generation import end_tokens, some_steps
from lyapunov_prune.predictions.spaces import PROBABILITIES, log_softmax, prediction_measures, turn
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result

READ = ("dense text", "own text")
_ENTRIES = 2**18  # of positions × vocabulary, measured at once: small enough for the CPU cache
_MEASURES = (
    "hidden",
    "logit",
    "logit_change",
    "probability",
    "probability_estimate",
    "kl_estimate",
    "kl",
    "flipped",
    "certain",
)


@dataclass(frozen=True)
class HistoryDivergence(Result):
    """The error of a compressed model at each decoding step: its direct error, and the effect of its earlier text.

    The dense model continues every prompt greedily; `z` are its logits on its own text. Arrays are (2, steps) float64,
    means over prompts for which neither model has ended its text. In row 0 the compressed model reads the dense model's
    text: only the weights differ (`F(ΔW, x) + F(Δx^prompt)`, eqs. 65 to 67 of Demystifying When Pruning Works via
    Representation Hierarchies). In row 1 it reads its own text: the context differs as well (third term of eq. 70).
    With `d = Δz/T`, `p = softmax(z/T)` and `q` of the compressed model:

    - `hidden`, `logit`: `1 − cos` of the input of the head (after the final norm) and of z; `hidden` is NaN for models
      of different width;
    - `logit_change = ‖Δz‖ / ‖z‖`;
    - `kl = KL(p‖q)` in nats and its estimate `kl_estimate = Var_p(d)/2` (Theorem 3);
    - `probability = 1 − cos(p, q)` and its estimate `probability_estimate = Var_r(d)/2`, `r_i = p_i²/‖p‖²` (Theorem 2);
    - `flipped`: top-1 disagreement, the share of prompts whose most likely token differs;
    - `may_spend = (p₁ − p₂)²/2` (steps,), with p₁ and p₂ the two largest of `p`: below this KL the most likely token
      cannot change, because no probability moves by half of `p₁ − p₂` (Pinsker's inequality); `certain`: the share of
      prompts for which KL is below it.

    `same_text` is the share of these prompts whose two texts agree before the step; once they differ, row 1 compares
    predictions about two different texts. `running` is the share of prompts in the means, which are NaN once it is 0.
    """

    hidden: np.ndarray
    logit: np.ndarray
    logit_change: np.ndarray
    probability: np.ndarray
    probability_estimate: np.ndarray
    kl_estimate: np.ndarray
    kl: np.ndarray
    flipped: np.ndarray
    certain: np.ndarray
    may_spend: np.ndarray
    same_text: np.ndarray
    running: np.ndarray
    temperature: float
    compressed: ModelIdentity
    measured_on: MeasuredOn

    @property
    def var_p(self) -> np.ndarray:
        return 2 * self.kl_estimate

    @property
    def var_r(self) -> np.ndarray:
        return 2 * self.probability_estimate

    def mean_kl(self) -> tuple[float, float]:
        """Mean KL on the dense text and on its own text, nats, over the steps at which a prompt is running."""
        seen = self.running > 0
        return float(self.kl[0, seen].mean()), float(self.kl[1, seen].mean())

    def spaces(self) -> tuple[float, float, float]:
        """Mean `1 − cos` of h, z and p on the dense text, over the steps at which a prompt is running."""
        seen = self.running > 0
        hidden, logit, probability = (x[0, seen].mean() for x in (self.hidden, self.logit, self.probability))
        return float(hidden), float(logit), float(probability)

    def to_frame(self) -> pd.DataFrame:
        """One row per reading and step."""
        steps = len(self.running)
        columns = {name: getattr(self, name).ravel() for name in (*_MEASURES, "var_p", "var_r")}
        columns["may_spend"] = np.tile(self.may_spend, 2)
        index = {"reads": np.repeat(READ, steps), "step": np.tile(np.arange(steps), 2)}
        return pd.DataFrame({**index, **columns, "same_text": np.tile(self.same_text, 2)})

    def summary(self) -> pd.DataFrame:
        """Steps 0, 1, 2, 4, 8, … and the last, with both readings side by side."""
        some = some_steps(len(self.running))
        columns: dict[str, np.ndarray] = {"step": np.array(some)}
        for row, name in enumerate(("direct", "own")):
            for measure in ("logit_change", "var_p", "var_r", "kl", "flipped"):
                columns[f"{measure}_{name}"] = getattr(self, measure)[row, some]
        return pd.DataFrame({**columns, "same_text": self.same_text[some], "running": self.running[some]})

    def headline(self) -> str:
        direct, own = self.mean_kl()
        hidden, logit, probability = self.spaces()
        return (
            f"Direct error and diverged history, {len(self.running)} steps, T = {self.temperature:g}, against "
            f"{self.compressed.name}: KL {direct:.3g} nats where it reads the dense text, {own:.3g} where it reads its "
            f"own; 1 − cos where it reads the dense text: state {hidden:.3g}, logits {logit:.3g}, probabilities "
            f"{probability:.3g}\n{self.measured_on.line()}"
        )


@runs_models
def history_divergence(
    dense: InMemory,
    compressed: InMemory,
    prompts: Readable,
    *,
    steps: Count,
    temperature: Positive = 1.0,
    batch_size: Count = 8,
    written: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> HistoryDivergence:
    """Decode `steps` tokens greedily with both models from `prompts` and compare predictions, see HistoryDivergence.

    The models may differ in layers and width, but must share a vocabulary. Each text is then read without a cache, once
    by the dense model and twice by the compressed one (in two parts if position encodings depend on the length,
    `last_states`). `written` are the texts that both models have already decoded (`forward.decoding.greedy_text`). A
    text ends at an end-of-text token of the dense model's generation config. Memory: final states of `batch_size`
    texts, and a block of logits of both models. Float64 from the logits on.

    Raises NonFiniteError naming the layer when a model is not finite, and LyapunovPruneError for different
    vocabularies, ids outside them, prompts and steps longer than the context, a temperature that is not above 0, and a
    decoder whose logits are not a function of its final state.
    """
    readings = [read(model, prompts, steps - 1) for model in (dense, compressed)]
    batch = readings[0].batch
    both = [greedy_text(r, batch_size, steps, known) for r, known in zip(readings, written or (None,) * 2, strict=True)]
    ends = end_tokens(dense.model)

    def compare(begun: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        here = [tokens[begun : begun + len(ids)] for tokens in both]
        over = torch.stack([torch.isin(tokens, ends) for tokens in here]).any(0).cumsum(-1) > 0
        runs = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), ~over[:, :-1]], 1)  # neither text has ended
        agree = (here[0] == here[1]).cumprod(-1).bool()
        agree = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), agree[:, :-1]], 1)
        texts = [torch.cat([ids.cpu(), tokens[:, :-1]], 1) for tokens in here]
        z = _states(readings[0], texts[0], steps)
        states = [_states(readings[1], text, steps) for text in texts]
        measured = [_measures(readings, z, changed, temperature).view(-1, len(ids), steps) for changed in states]
        sums = torch.stack([torch.where(runs, each, 0).sum(1) for each in measured])
        return sums, (runs & agree).double().sum(0), runs.double().sum(0)

    found = dealt(readings[0], batch_size, compare, "direct error and history")
    sums, same, running = (reduce(torch.add, terms) for terms in zip(*found, strict=True))
    means = (sums / running).numpy()  # 0 / 0 is NaN
    return HistoryDivergence(
        **{name: means[:, k].copy() for k, name in enumerate(_MEASURES)},
        may_spend=means[0, -1].copy(),
        same_text=(same / running).numpy(),
        running=(running / len(batch)).numpy(),
        temperature=float(temperature),
        compressed=compressed.identity,
        measured_on=readings[0].measured_on(),
    )


def _states(reading: Reading, text: torch.Tensor, steps: int) -> torch.Tensor:
    """The final states that give the last `steps` predictions, (windows · steps) × width."""
    ids = text.to(reading.model.device)
    state = last_states(reading.structure, ids, steps)
    require_finite(reading.structure, ids, "a decoded text", state)
    return state.flatten(0, 1)


def _measures(
    readings: Sequence[Reading], dense: torch.Tensor, changed: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The measures of every row of final states and `may_spend`: (measures, rows) float64."""
    parts = []
    for h, h2 in readings[0].scorer.split(dense, changed):
        z, z2 = (reading.scorer.logits(x).cpu() for reading, x in zip(readings, (h, h2), strict=True))
        require_one_vocabulary(z.shape[-1], z2.shape[-1])
        for logits in (z, z2):
            require_numbers(logits, "logits")
        turned = turn(h, h2)[0].cpu() if h.shape == h2.shape else torch.full((len(h),), torch.nan)
        rows = max(1, _ENTRIES // z.shape[-1])
        of = [_of_logits(lift(a), lift(b), temperature) for a, b in zip(z.split(rows), z2.split(rows), strict=True)]
        parts.append(torch.cat([turned.double()[None], torch.cat(of, dim=-1)]))
    return torch.cat(parts, dim=-1)


def _of_logits(z: torch.Tensor, z2: torch.Tensor, temperature: float) -> torch.Tensor:
    """All measures but the first, and `may_spend`, of two blocks of logits in float64."""
    moved = (z2 - z).norm(dim=-1) / z.norm(dim=-1)
    log_p = log_softmax(z, temperature)
    of = dict(zip(PROBABILITIES, prediction_measures(log_p, log_softmax(z2, temperature)), strict=True))
    first, second = log_p.exp().topk(2, dim=-1).values.T
    may_spend = (first - second).square() / 2
    flipped = z.argmax(-1) != z2.argmax(-1)
    known = [turn(z, z2)[0], moved, *(of[name] for name in _MEASURES[3:7]), flipped, of["kl"] < may_spend, may_spend]
    return torch.stack([x.double() for x in known])
