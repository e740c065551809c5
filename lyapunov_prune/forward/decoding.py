"""Greedy and sampled decoding, with any kind of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.hooks import hidden_of, require_finite
from lyapunov_prune.forward.logits import carried_on, only_last, position
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.hooked import hooked

# The next tokens (prompts × 1), given the step and its logits (prompts × vocabulary).
Choice = Callable[[int, torch.Tensor], torch.Tensor]


def likeliest(step: int, logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1, keepdim=True)


def drawn(draws: torch.Tensor, temperature: float = 1.0) -> Choice:
    """Sampling from `p = softmax(z/T)` with given random numbers `draws` (prompts × steps) in [0, 1).

    Takes the first token with `Σ_{v' ≤ v} p_v' > draw`, summed in float64 in vocabulary order, so equal draws and equal
    logits give equal text.
    """
    u = draws.to(torch.float64)

    def choose(step: int, logits: torch.Tensor) -> torch.Tensor:
        reached = (lift(logits) / temperature).softmax(-1).cumsum(-1)
        found = torch.searchsorted(reached, u[:, step, None].to(reached).contiguous(), right=True)
        # The sum may end just below 1, with the draw above it.
        return found.clamp_max(logits.shape[-1] - 1)

    return choose


def draws_of(seed: int, places: Iterable[int], steps: int) -> torch.Tensor:
    """Random numbers in [0, 1), places × steps; those of a place do not depend on the other places."""
    return torch.from_numpy(np.stack([np.random.default_rng((seed, place)).random(steps) for place in places]))


def greedy_text(reading: Reading, batch_size: int, steps: int, known: torch.Tensor | None = None) -> torch.Tensor:
    """`continued` for all prompts of the reading, `batch_size` at a time: (prompts × steps), on the CPU.

    A `known` text from an earlier call is returned instead. Raises LyapunovPruneError if it has another shape.
    """
    shape = (len(reading.batch), steps)
    if known is None:
        return torch.cat(
            dealt(reading, batch_size, lambda first, ids: continued(reading, ids, steps).cpu(), "greedy text")
        )
    if known.shape != shape:
        raise LyapunovPruneError(f"a written text of shape {tuple(known.shape)}; give prompts × steps, {shape}")
    return known.cpu()


@torch.no_grad()
def continued(reading: Reading, prompts: torch.Tensor, steps: int, choose: Choice = likeliest) -> torch.Tensor:
    """The next `steps` tokens, each by `choose`: prompts (windows × tokens) to (windows × steps), int64."""
    tokens = [token for *_, token in walk(reading, prompts, steps, told=True, choose=choose)]
    return torch.cat(tokens, 1).to(prompts)


def walk(
    reading: Reading,
    prompts: torch.Tensor,
    steps: int,
    told: bool,
    choose: Choice = likeliest,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each step: the output of the last layer (prompts × d), the logits (prompts × vocabulary) and the next token.

    The next token (prompts × 1) is `choose` of the model's own logits. The generation config (penalties, EOS) is
    ignored, so decoding continues after the end of a text. `told`: every step is given its position, without which some
    forwards count from zero at each call. Every step equals an uncached forward over the text so far: a decoder without
    a cache runs on the whole text at each step, and one whose positions change with the length reruns it where they do.
    Raises NonFiniteError naming the layer if the model is not finite.
    """
    model, structure = reading.model, reading.structure
    states: list[torch.Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        states.append(hidden_of(output)[:, -1].flatten(1))

    text = ids = prompts.to(model.device)
    given = only_last(model, 1)
    carried: dict[str, Any] = {}
    for t in range(steps):
        if carried and told:
            carried |= position(model, ids, text.shape[1] - 1)
        with hooked(after=[(structure.layers[-1], note)]):
            output = model(ids, **given, **carried, use_cache=True)
        logits = output.logits[:, -1]
        require_finite(structure, text, f"step {t}", logits)
        carried = carried_on(model, output, text.shape[1])
        del output
        tokens = choose(t, logits).to(ids)
        yield states.pop(), logits, tokens
        text = torch.cat([text, tokens], 1)
        ids = tokens if carried else text
