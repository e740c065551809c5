"""Estimate what shrinking will cost on this machine, from a few timed forwards of the model itself."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.tasks import Task, evaluate_tasks
from lyapunov_prune.forward.own_text import AT_ONCE, self_generated
from lyapunov_prune.healing.heal import STEPS
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.models.size import model_size
from lyapunov_prune.models.structure import find_structure, identify, in_eval_mode
from lyapunov_prune.ranking.counts import search_budget
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import ModelIdentity, Result
from lyapunov_prune.shrinking.target import Target
from lyapunov_prune.shrinking.texts import Texts

_STEP = 5  # a step of distillation in forwards: one of the teacher, one of the student, and the backward pass
_SAVED = 1e8  # bytes per second, written and read back
TASK = "answering the task"
LOW_RANK = 16  # rank of the healing updates in half precision, or if the optimizer does not fit


@dataclass(frozen=True)
class Estimate(Result):
    """What shrinking `model` by `remove` layers will take: `seconds` of each step, `memory` and `disk` in bytes.

    `remove` is None if only the choice itself shows how many layers go; the estimate is then for removing a quarter, or
    the share of the parameters that is asked for. There are `searches` searches of `search` forwards each, on average.
    Memory is counted beside the loaded model. `rank` is the rank of the updates that heal the model, None if all
    parameters of the layers are trained; `step_seconds` is the time of one such step.
    """

    model: ModelIdentity
    target: str
    remove: int | None
    searches: int
    search: float
    seconds: dict[str, float]
    memory: int
    disk: int
    rank: int | None
    step_seconds: float

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"step": self.seconds.keys(), "minutes": [s / 60 for s in self.seconds.values()]})

    def answer(self) -> list[str]:
        how = "all weights of its layers" if self.rank is None else f"updates of rank {self.rank}"
        return [
            f"{self.remove or 'As many as allowed'} of {self.model.num_layers} layers of {self.model.name} will go "
            f"({self.target}); healed by {how}",
            f"About {_time(sum(self.seconds.values()))} here, {self.memory / 1e9:.2g} GB of memory beside the model, "
            f"{self.disk / 1e9:.2g} GB of disk",
        ]


@in_eval_mode
def window_seconds(model: PreTrainedModel, context: int) -> float:
    """The seconds that a forward of one window takes, after a warm-up."""
    ids = torch.zeros((1, context), dtype=torch.int64, device=model.device)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        model(ids, use_cache=False).logits[0, -1, 0].item()  # `.item()` waits for a GPU
        seconds = time.perf_counter() - began
    return seconds


def writing_seconds(model: PreTrainedModel, windows: int, context: int) -> float:
    """The seconds in which `model` generates a text, estimated from a few tokens."""
    few = min(8, context)
    began = time.perf_counter()
    self_generated(model, tokens=AT_ONCE * few, context=few)
    step = (time.perf_counter() - began) / (few - 1)
    return step * (context - 1) * -(-windows // AT_ONCE)


def answering_seconds(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *halves: Task) -> float:
    """The seconds in which a model answers every item of `halves`, if each takes as long as the first."""
    began = time.perf_counter()
    evaluate_tasks({"model": model}, tokenizer, halves[:1], limit=1)
    return (time.perf_counter() - began) * sum(len(half.harness.eval_docs) for half in halves)


def estimated(
    model: PreTrainedModel,
    target: Target,
    texts: Texts,
    remove: int | None,
    *,
    search: float | None,
    steps: int | None,
    answering: float,
    minutes: float | None,
) -> Estimate:
    """The cost of shrinking by `remove` layers to a `target`, with these `texts`.

    `search` is the number of forwards for choosing, `steps` the number of healing steps; None means the usual number.
    `answering` is the time in seconds of one pass over the task that chooses the layers. `minutes` bounds the whole.
    """
    context, choosing = texts.width, texts.searched(model)
    structure = find_structure(model)
    layers = structure.num_layers
    goes = max(1, layers // 4) if remove is None else remove
    counts = [goes] * (1 if remove is not None else 1 + math.ceil(math.log2(layers)))
    window, chosen = window_seconds(model, context), choosing[0] * window_seconds(model, choosing[1])
    smaller = smaller_bytes(model, goes)
    budgets = [search or search_budget(layers, count) for count in counts]
    budget = sum(budgets)
    seconds = {"writing the text": 0.0}
    if texts.learn is None:  # the model writes them
        written = [(texts.windows, context), *([choosing] if choosing[1] != context else [])]
        seconds["writing the text"] = sum(writing_seconds(model, *text) for text in written)
    seconds["choosing layers"] = budget * chosen / 2
    seconds["mending"] = 2 * chosen * len(counts)
    seconds["healing"] = (steps or STEPS) * _STEP * window
    if answering:  # the dense model and every choice answer one half; both models answer the other half at the end
        seconds[TASK] = answering * (len(counts) + 3) / 2
    seconds["evaluation"] = 5 * window * texts.evaluated / context  # both models on two texts, and the KL on one
    seconds["check and files"] = 2 * smaller / _SAVED + 20 * window
    if minutes is not None:
        rest = sum(seconds.values()) - seconds["healing"]
        seconds["healing"] = max(0.0, 60 * minutes - rest)
    rank, memory = healed_by(model, goes, context)
    return Estimate(
        model=identify(model),
        target=target.told(),
        remove=remove,
        searches=len(counts),
        search=sum(budgets) / len(budgets),
        seconds=seconds,
        memory=memory,
        disk=smaller + trained_bytes(model, goes, rank) * 4,
        rank=rank,
        step_seconds=_STEP * window,
    )


def healed_by(model: PreTrainedModel, remove: int, context: int) -> tuple[int | None, int]:
    """The rank of the updates that heal (None: all weights are trained), and the bytes of memory that this needs.

    All weights are trained if they are in float32 and memory holds a copy, its gradients, the two moments of the
    optimizer and the best weights so far. Raises LyapunovPruneError if even low-rank updates do not fit.
    """
    smaller = smaller_bytes(model, remove)
    logits = 8 * context * find_structure(model).config.vocab_size * 4
    free = free_memory(str(model.device))
    wide = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    needed = smaller + 4 * trained_bytes(model, remove, None) + logits
    if wide and needed <= free:
        return None, needed
    needed = smaller + 4 * trained_bytes(model, remove, LOW_RANK) + logits
    if needed > free:
        raise LyapunovPruneError(
            f"shrink needs {needed / 1e9:.1f} GB beside the model, and {free / 1e9:.1f} GB are free on {model.device}; "
            "free some, or remove layers without healing: rank --device disk, then prune --device disk --plan"
        )
    return LOW_RANK, needed


def trained_bytes(model: PreTrainedModel, remove: int, rank: int | None) -> int:
    """The bytes of the trained parameters in float32, once `remove` layers are gone."""
    structure = find_structure(model)
    kept = 1 - remove / structure.num_layers
    parameters = list(structure.layers.parameters())
    if rank is None:
        return int(4 * kept * sum(p.numel() for p in parameters))
    return int(4 * kept * sum(rank * sum(p.shape) for p in parameters if p.ndim == 2))


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"


def smaller_bytes(model: PreTrainedModel, remove: int) -> int:
    """The bytes of `model` without `remove` layers of mean size."""
    layers = find_structure(model).layers
    size = sum(p.numel() * p.element_size() for p in layers.parameters())
    return model_size(model).bytes - remove * size // len(layers)
