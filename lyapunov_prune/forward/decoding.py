"""Greedy and sampled decoding through whatever cache a decoder keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import hidden_of, require_finite
from lyapunov_prune.forward.logits import carried_on
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.hooked import hooked


@torch.no_grad()
def decode_greedily(reading: Reading, prompts: torch.Tensor, steps: int) -> torch.Tensor:
    """The `steps` likeliest tokens one after the other: prompts (windows × tokens) to (windows × steps), int64."""
    return torch.stack([logits.argmax(-1) for _, logits in walk(reading, prompts, steps, told=True)], 1).to(prompts)


@torch.no_grad()
def sample(reading: Reading, prompts: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Tokens drawn from `p = softmax(z)` one after the other: prompts (n × tokens) to (n × steps), int64.

    `draws` (n × steps, in [0, 1)) decide: the token is the first with `Σ_{v' ≤ v} p_v' > draw`, summed in float64 in
    the order of the vocabulary. So the same draws give the same text wherever the logits are the same.
    """
    u = draws.to(torch.float64)
    tokens: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        reached = lift(logits).softmax(-1).cumsum(-1)
        # The sum may end a rounding below 1, and a draw lie between the two.
        draw = u[:, len(tokens), None].to(reached).contiguous()
        drawn = torch.searchsorted(reached, draw, right=True)
        tokens.append(drawn.clamp_max(logits.shape[-1] - 1))
        return tokens[-1]

    for _ in walk(reading, prompts, u.shape[1], told=True, choose=choose):
        pass
    return torch.cat(tokens, 1).to(prompts)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1, keepdim=True)


def walk(
    reading: Reading,
    prompts: torch.Tensor,
    steps: int,
    told: bool,
    choose: Callable[[torch.Tensor], torch.Tensor] = likeliest,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """At every step what leaves the last layer (prompts × d) and the logits (prompts × vocabulary); then goes on.

    The next token is what `choose` makes of the model's own logits, (prompts × 1). Nothing else has a say: the model's
    generation config (its penalties, its EOS) is not asked, so decoding goes on behind the end of a text. `told`: every
    step is given its position, without which some forwards count from zero at every call. A decoder that gives back no
    cache runs on the whole text again at every step. Raises NonFiniteError naming the layer when the model is not
    finite.
    """
    model, structure = reading.model, reading.structure
    taken = inspect.signature(model.forward).parameters
    states: list[torch.Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        states.append(hidden_of(output)[:, -1].flatten(1))

    text = ids = prompts.to(model.device)
    given: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
    carried: dict[str, Any] = {}
    for t in range(steps):
        if carried and told and "position_ids" in taken:
            carried["position_ids"] = torch.full_like(ids, text.shape[1] - 1)
        with hooked(after=[(structure.layers[-1], note)]):
            output = model(ids, **given, **carried, use_cache=True)
        logits = output.logits[:, -1]
        if not logits.isfinite().all():
            require_finite(structure, text, f"step {t}")
            raise LyapunovPruneError(f"the logits of step {t} are not finite; load the model in a wider dtype")
        carried = carried_on(model, output)
        del output
        yield states.pop(), logits
        tokens = choose(logits).to(ids)
        text = torch.cat([text, tokens], 1)
        ids = tokens if carried else text
