"""Two models generate from the same prompts, each from its own tokens: their distance at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count, Positive, Seed
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.repetition import collapsed, repetition
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.decoding import drawn, draws_of, likeliest, walk
from lyapunov_prune.forward.hooks import require_finite
from lyapunov_prune.forward.logits import (
    CACHE_LIMIT,
    cached_logits,
    deviation,
    last_logits,
    require_one_vocabulary,
    sample_inputs,
)
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import InMemory, runs_models
from lyapunov_prune.predictions.spaces import kl_divergence, turn
from lyapunov_prune.results.frames import columns, pd
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result


@dataclass(frozen=True)
class GenerationDivergence(Result):
    """Decoding of a dense and a compressed model from the same prompts, each continuing its own text.

    Greedy, or sampled with common random numbers if `measured_on.seed` is set. Per step, (steps,) float64, means over
    the prompts for which neither model has ended its text:

    - `state_similarity`, `logit_similarity`, `probability_similarity`: cosine of the output of the last layer (before
      the final norm; NaN where the widths differ), of the logits `z`, and of `p = softmax(z/T)`;
    - `kl`: `KL(p‖q)` in nats, `q` of the compressed model.

    `running` is the share of prompts in that mean; the four measures are NaN once it is 0. After the texts have
    diverged, predictions about two different texts are compared (Demystifying When Pruning Works via Representation
    Hierarchies, §7.1). `dense_tokens` and `compressed_tokens` are the generated tokens per prompt, without the
    end-of-text token.
    """

    state_similarity: np.ndarray
    logit_similarity: np.ndarray
    probability_similarity: np.ndarray
    kl: np.ndarray
    running: np.ndarray
    dense_tokens: tuple[tuple[int, ...], ...]
    compressed_tokens: tuple[tuple[int, ...], ...]
    temperature: float
    compressed: ModelIdentity
    measured_on: MeasuredOn

    @property
    def first_difference(self) -> tuple[int, ...]:
        """For every prompt, the first step at which the texts differ, or the number of steps if they never do."""
        pairs = zip(self.dense_tokens, self.compressed_tokens, strict=True)
        return tuple(_first_difference(a, b, len(self.kl)) for a, b in pairs)

    @property
    def kept(self) -> np.ndarray:
        """(prompts,): share of the dense continuation, including its end, before the texts differ."""
        written = np.array([min(len(text) + 1, len(self.kl)) for text in self.dense_tokens])
        return np.minimum(self.first_difference, written) / written

    @property
    def same_text(self) -> np.ndarray:
        """(steps,): share of prompts whose texts agree up to and including this step."""
        return (np.array(self.first_difference) > np.arange(len(self.kl))[:, None]).mean(-1)

    def to_frame(self) -> pd.DataFrame:
        similarities = columns(
            self, state="state_similarity", logits="logit_similarity", probabilities="probability_similarity"
        )
        return pd.DataFrame(
            {"step": np.arange(len(self.kl)), **similarities, **columns(self, "kl", "same_text", "running")}
        )

    def summary(self) -> pd.DataFrame:
        """Steps 0, 1, 2, 4, 8, … and the last."""
        return self.to_frame().iloc[some_steps(len(self.kl))]

    def headline(self) -> str:
        first, texts = self.first_difference, (self.dense_tokens, self.compressed_tokens)
        repeated = " and ".join(f"{np.mean([repetition(t, 3) for t in text]):.0%}" for text in texts)
        ends = " and ".join(str(sum(map(collapsed, text))) for text in texts)
        seed = self.measured_on.seed
        how = "Greedy decoding" if seed is None else f"Decoding with draws of seed {seed}"
        return (
            f"{how}, {len(self.kl)} steps from {len(first)} prompts, T = {self.temperature:g}, "
            f"against {self.compressed.name} ({self.compressed.num_layers} layers)\n"
            f"first difference: median step {np.median(first):g}, none in {sum(f == len(self.kl) for f in first)}; "
            f"dense and compressed: {repeated} of 3-grams repeated, {ends} texts collapsed\n{self.measured_on.line()}"
        )


@runs_models
def compare_generation(
    dense: InMemory,
    compressed: InMemory,
    prompts: Readable,
    *,
    steps: Count,
    temperature: Positive = 1.0,
    seed: Seed | None = None,
    batch_size: Count = 8,
) -> GenerationDivergence:
    """Decode `steps` tokens with both models from `prompts` (prompts × tokens), see GenerationDivergence.

    Decoding is greedy. With a `seed`, tokens are sampled from `p = softmax(z/T)` and `q` with common random numbers:
    one uniform number per prompt and step decides for both models (`forward.decoding.drawn`), so that equal models
    write equal texts.

    The models may differ in layers and width, but must share a vocabulary. Each has its own cache; a decoder without
    one reads its whole text again at every step. A text ends at an end-of-text token of the dense model's generation
    config. `temperature` applies to `p` and `q`; it does not change greedy tokens. Cosines and divergences are in
    float64.

    Memory: both caches, and a few `batch_size` × vocabulary tensors of one step (after a check of the cache on 2 × 64
    tokens).

    Raises NonFiniteError naming the layer when a model is not finite, and LyapunovPruneError for different
    vocabularies, ids outside them, prompts that leave no room for the steps, a temperature that is not above 0, or a
    decoder whose cached and uncached outputs differ.
    """
    readings = [read(model, prompts, steps) for model in (dense, compressed)]
    batch = readings[0].batch
    told = [_told_positions(reading) for reading in readings]
    ends = end_tokens(dense.model)
    draws = None if seed is None else draws_of(seed, range(len(batch.ids)), steps)

    def generate(begun: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[list[tuple[int, ...]]]]:
        sums, running = torch.zeros(steps, 4, dtype=torch.float64), torch.zeros(steps, dtype=torch.float64)
        choose = likeliest if draws is None else drawn(draws[begun : begun + len(ids)], temperature)
        written: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        ended = torch.zeros(2, len(ids), dtype=torch.bool)
        walks = [walk(reading, ids, steps, by, choose) for reading, by in zip(readings, told, strict=True)]
        for t, ((h, z, token), (h2, z2, token2)) in enumerate(zip(*walks, strict=True)):
            require_one_vocabulary(z.shape[-1], z2.shape[-1])
            both = ~ended.any(0)
            running[t] += both.sum()
            sums[t] += _measures(temperature, *(x[both.to(x.device)] for x in (h, h2, z, z2)))
            for model_ended, tokens, chosen in zip(ended, written, (token, token2), strict=True):
                tokens.append(chosen[:, 0].cpu())
                model_ended |= torch.isin(tokens[-1], ends)
            if ended.all():
                break
        return sums, running, [[_cut(row, ends) for row in torch.stack(tokens, -1)] for tokens in written]

    found = dealt(readings[0], batch_size, generate, "generation")
    sums, running = (reduce(torch.add, terms) for terms in list(zip(*found, strict=True))[:2])
    texts = [[row for *_, both in found for row in both[side]] for side in (0, 1)]
    state, logit, probability, kl = (sums / running.unsqueeze(-1)).numpy().T.copy()  # 0 / 0 is NaN
    return GenerationDivergence(
        state_similarity=state,
        logit_similarity=logit,
        probability_similarity=probability,
        kl=kl,
        running=(running / len(batch.ids)).numpy(),
        dense_tokens=tuple(texts[0]),
        compressed_tokens=tuple(texts[1]),
        temperature=float(temperature),
        compressed=compressed.identity,
        measured_on=readings[0].measured_on(seed),
    )


def _told_positions(reading: Reading) -> bool:
    """Whether cached decoding is only correct when every step passes its position explicitly."""
    model = reading.model
    ids = sample_inputs(reading.decoder, None)[0]
    wanted = last_logits(model, ids)
    for positions in (False, True):
        logits = cached_logits(model, ids, positions=positions)
        if logits is None or deviation(logits, wanted) <= CACHE_LIMIT[model.dtype]:
            return positions
    require_finite(reading.structure, ids, "random tokens")
    raise LyapunovPruneError(
        f"{type(model).__name__} gives other outputs with its cache than without; it cannot be compared"
    )


def _measures(T: float, h: torch.Tensor, h2: torch.Tensor, z: torch.Tensor, z2: torch.Tensor) -> torch.Tensor:
    """The three cosines and `KL(p‖q)`, summed over prompts: (4,) float64."""
    device = lift(z).device
    h, h2, z, z2 = (lift(x).to(device) for x in (h, h2, z, z2))
    turned = turn(h, h2)[0] if h.shape == h2.shape else torch.full((len(h),), torch.nan)
    log_p, log_q = ((x / T).log_softmax(-1) for x in (z, z2))
    turns = (turned, turn(z, z2)[0], turn(log_p.exp(), log_q.exp())[0])
    measures = (*(1 - x for x in turns), kl_divergence(log_p, log_q))
    return torch.stack([x.sum().double().cpu() for x in measures])


def some_steps(steps: int) -> list[int]:
    """Indices 0, 1, 2, 4, 8, … and the last of `n` steps."""
    return sorted({0, steps - 1, *(2**k for k in range(steps.bit_length()) if 2**k < steps)})


def end_tokens(model: PreTrainedModel) -> torch.Tensor:
    """The end-of-text tokens of the generation config; may be empty."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return torch.tensor([] if ends is None else ends, dtype=torch.int64).flatten()


def _cut(tokens: torch.Tensor, ends: torch.Tensor) -> tuple[int, ...]:
    """The tokens before the first end of text."""
    stop = torch.isin(tokens, ends).nonzero()
    return tuple(tokens[: int(stop[0]) if len(stop) else None].tolist())


def _first_difference(a: tuple[int, ...], b: tuple[int, ...], steps: int) -> int:
    if a == b:
        return steps
    return next((t for t, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
