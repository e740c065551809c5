"""Logits of a decoder on a few tokens: in one forward, and step by step through any kind of cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from lyapunov_prune.data.examples import Examples, model_inputs
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.pictures import image_shape, looks_at_images
from lyapunov_prune.models.positions import rotation, stretches
from lyapunov_prune.models.structure import Structure, random_ids

# Largest relative deviation of a token's logits. The same kernels on the same shapes agree bit for bit; folded
# constants (GPT-2) and the cache's kernels do not, and a model ruined by a removal (SmolLM2 without layer 0) amplifies
# rounding a hundredfold. A wrong layer or index gives 0.1 to 10.
SAME_LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
TOKENS = 64
STEPS = 8
_FAR = 1e3  # nats; the probability is 0 even in float64
_LIFTED = 2**19  # entries of positions × vocabulary compared in float64 at once
WINDOW_LIMIT = 1024  # the check does not run past longer sliding windows: it would take longer than the removal


def require_one_vocabulary(*sizes: int) -> None:
    """Raise LyapunovPruneError unless the vocabularies of all models have one size."""
    if len(set(sizes)) > 1:
        raise LyapunovPruneError(
            f"vocabularies of {' and '.join(map(str, sizes))} tokens; compare two versions of one model"
        )


def deviation(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """`max_t ‖z_t − z'_t‖ / ‖z'_t − mean z'_t‖` in float64; infinite when a value is not finite.

    Entries that mask tokens (fewer than half, more than _FAR below the largest) count only where they are no masks in
    `logits`: a norm with −1e30 in it would hide every other difference.
    """
    if logits.shape != reference.shape:
        return float("inf")
    worst, rows = 0.0, max(1, _LIFTED // logits.shape[-1])
    parts = zip(logits.flatten(0, -2).split(rows), reference.flatten(0, -2).split(rows), strict=True)
    for a, b in ((lift(z), lift(wanted)) for z, wanted in parts):
        if not (a.isfinite().all() and b.isfinite().all()):
            return float("inf")
        floor = b.amax(-1, keepdim=True) - _FAR
        masked = b < floor
        masked &= 2 * masked.sum(-1, keepdim=True) < b.shape[-1]
        if masked.any():
            a, b = (x.where(~masked, x.clamp_min(floor) - floor) for x in (a, b))
        mean = b.sum(-1, keepdim=True) / (~masked).sum(-1, keepdim=True)
        spread = torch.linalg.vector_norm((b - mean).masked_fill(masked, 0), dim=-1)
        worst = max(worst, float((torch.linalg.vector_norm(a - b, dim=-1) / spread.clamp_min(1e-300)).max()))
    return worst


def sample_inputs(decoder: Decoder, batch: Examples | None) -> list[torch.Tensor]:
    """Two rows of random tokens and, if given, the first window of `batch`, cut to a useful length.

    For an image classifier: two random images (2 × channels × height × width) and, if given, the first two of `batch`.
    `batch` is one of this model (`data.examples.as_examples`).
    """
    model, structure, config = decoder.model, decoder.structure, decoder.structure.config
    if looks_at_images(model):
        return [random_images(model), *(() if batch is None else model_inputs(model, batch, 2)[:1])]
    window = getattr(config, "sliding_window", None) or 0
    length = max(TOKENS, window + 2 * STEPS) if window <= WINDOW_LIMIT else TOKENS
    length = structure.at_most(length)
    given = [] if batch is None else model_inputs(model, batch, 1)[:1]
    return [random_ids(config, 2, length).to(model.device), *(ids[:, :length] for ids in given)]


def random_images(model: PreTrainedModel, number: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(number, *image_shape(model), generator=generator).to(model.device, model.dtype)


def uncached_logits(model: PreTrainedModel, inputs: torch.Tensor) -> torch.Tensor:
    """The logits for token ids or images."""
    return model(inputs).logits if inputs.is_floating_point() else model(inputs, use_cache=False).logits


def last_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The uncached logits at the positions that `cached_logits` returns; no others are formed if the model allows that.

    Each equals that of a forward over the text up to there: one forward, and another one where positions change.
    """
    parts = []
    for first, last in stretches(model.config.get_text_config(decoder=True), _prefix(ids), ids.shape[1]):
        number = last - first + 1
        parts.append(model(ids[:, :last], use_cache=False, **only_last(model, number)).logits[:, -number:])
    return torch.cat(parts, dim=1)


def last_states(structure: Structure, ids: torch.Tensor, number: int) -> torch.Tensor:
    """The last `number` final states (windows × number × width), each of a forward over the text up to there."""
    read = stretches(structure.config, ids.shape[1] - number + 1, ids.shape[1])
    return torch.cat([final_state(structure, ids[:, :last])[:, first - 1 :] for first, last in read], dim=1)


def _prefix(ids: torch.Tensor) -> int:
    """The number of tokens read at once before the steps; a cache begins with at least one."""
    return max(1, ids.shape[1] - STEPS)


def only_last(model: PreTrainedModel, positions: int) -> dict[str, int]:
    """The argument that makes a forward form only the last `positions` logits; empty if it takes none."""
    taken = inspect.signature(model.forward).parameters
    return {"logits_to_keep": positions} if "logits_to_keep" in taken else {}


def position(model: PreTrainedModel, ids: torch.Tensor, t: int) -> dict[str, torch.Tensor]:
    """The argument that gives all of `ids` the position `t`; empty for a forward that takes none."""
    taken = inspect.signature(model.forward).parameters
    return {"position_ids": torch.full_like(ids, t)} if "position_ids" in taken else {}


def carried_on(model: PreTrainedModel, output: Any, length: int) -> dict[str, Any]:
    """The cache after `length` tokens as arguments for the next forward, under whatever name the model uses.

    Empty for a decoder without a cache, and if one more token changes the rotary positions (`models.positions`): then
    the keys are stale and the whole text has to be read again.
    """
    config = model.config.get_text_config(decoder=True)
    return cache_of(model, output) if rotation(config, length) == rotation(config, length + 1) else {}


def cache_of(model: PreTrainedModel, output: Any) -> dict[str, Any]:
    taken = inspect.signature(model.forward).parameters
    return {name: value for name, value in output.items() if name in taken and value is not None}


def cached_logits(model: PreTrainedModel, ids: torch.Tensor, *, positions: bool = False) -> torch.Tensor | None:
    """Logits of the last tokens: a prefix at once, then one token at a time through the cache, as long as it is valid.

    `positions` passes the position of each step, as `generate` does; some forwards count from zero at each call without
    it. None for a decoder that returns no cache.
    """
    start = _prefix(ids)
    output = model(ids[:, :start], use_cache=True, **only_last(model, 1))
    if not cache_of(model, output):
        return None
    steps = [output.logits[:, -1:]]
    for t in range(start, ids.shape[1]):
        carried = carried_on(model, output, t)
        if carried and positions:
            carried |= position(model, ids[:, :1], t)
        output = model(ids[:, t if carried else 0 : t + 1], **carried, use_cache=True)
        steps.append(output.logits[:, -1:])
    return torch.cat(steps, dim=1)


# Even in a float64 model, transformers computes some softmax and norms in float32, which round differently by length.
CACHE_LIMIT = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
