"""KL and loss of a changed model on the windows of a text, from final states that are kept."""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.forward.states import predicting
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.predictions.tiles import measures


@torch.no_grad()
def finals(reading: Reading, model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """The final state of every window by `model`, tokens × width."""
    other = read(wrap(model), reading.batch)
    for ids in reading.windows(1):
        yield final_state(other.structure, ids)[0]


@torch.no_grad()
def losses(reading: Reading, states: Sequence[torch.Tensor]) -> tuple[float, ...]:
    pairs = zip(states, reading.windows(1), strict=True)
    return tuple(reading.scorer.loss(state, ids[0]) for state, ids in pairs)


@torch.no_grad()
def divergences(reading: Reading, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """`KL(dense‖compressed)` of every window, the mean over its positions but the last."""
    pairs = ([predicting(state[None]) for state in pair] for pair in zip(before, after, strict=True))
    return tuple(float(measures(reading.scorer, p, [q], 1.0)[0, 1].mean()) for p, q in pairs)
