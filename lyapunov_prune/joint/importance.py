"""Importance of each attention and each activation within its type, which gives the order of removal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count, Seed, checked
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.examples import Examples
from lyapunov_prune.forward.anatomy import find_anatomy
from lyapunov_prune.forward.hooks import hidden_of, with_hidden
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.healing.trained import drawn_order, frozen
from lyapunov_prune.joint.recovery import stacked
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.feedforward import Affine, FeedForward
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

METHOD = "taylor"
STEPS = 16  # each on one text item or some images


_Worth = Annotated[np.ndarray, Per("layer", least=-np.inf)]


@dataclass(frozen=True)
class Importance(Result):
    """Importance of the attention and the activation of each layer, (L,) each; the smallest of a type is removed first.

    With `m f(x) + (1 − m) f_cut(x)` in every sublayer (f_cut = 0 for attention; for a feed-forward block the block with
    its activation replaced by `reduction`): `|∂loss/∂m|` at m = 1 of the mean loss over `items` items. The two types
    are not comparable, and nothing here compares them.
    """

    method: str
    reduction: str
    items: int
    attention: _Worth
    activation: _Worth
    measured_on: tuple[MeasuredOn, ...] = ()

    def first(self, attention: int, activation: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The layers that lose their attention first and those that lose their activation first, this many of each."""
        orders = (np.argsort(worth, kind="stable") for worth in (self.attention, self.activation))
        a, g = (tuple(order[:n].tolist()) for order, n in zip(orders, (attention, activation), strict=True))
        return a, g

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: importance of both parts, and their ranks within the type (0 is removed first)."""
        frame = pd.DataFrame({"layer": np.arange(len(self.attention))})
        for name in ("attention", "activation"):
            worth = getattr(self, name)
            frame[name] = worth
            frame[f"{name} goes"] = np.argsort(np.argsort(worth, kind="stable"), kind="stable")
        return frame

    def headline(self) -> str:
        return (
            f"Importance within each type by {self.method} ({self.items} items, reduction {self.reduction}); "
            "the two types are not compared"
        )


@in_eval_mode
def _measure(model: PreTrainedModel, measure: Callable[[], np.ndarray]) -> np.ndarray:
    with frozen(model):
        return measure()


@checked
def measure_importance(student: Unmerged, examples: Examples, *, batch: Count = 1, seed: Seed = 0) -> Importance:
    """Importance in the unchanged model of `student`, whose weights are not trained.

    STEPS forwards and backwards of `batch` items each, in an order drawn from `seed`. Raises LyapunovPruneError for
    gradients that are not finite.
    """
    drawn = drawn_order(len(examples), STEPS * batch, seed)
    order = [drawn[i : i + batch] for i in range(0, len(drawn), batch)]
    worth = _measure(student.model, lambda: taylor(student, examples, order))
    require_numbers(worth, "importance by the gradient of the loss")
    attention, activation = worth
    return Importance(
        METHOD, student.reduction, len(drawn), attention, activation, (examples.measured_on(student.model, seed),)
    )


@torch.enable_grad()
def taylor(student: Unmerged, examples: Examples, order: Sequence[Sequence[int]]) -> np.ndarray:
    """`|∂loss/∂m|` at m = 1, (2, L) float64: attentions, then activations; mean loss over these batches."""
    m = torch.ones(2, len(student.blocks), device=student.model.device, dtype=student.model.dtype, requires_grad=True)
    total = np.zeros(m.shape)
    with mixed(student, lambda: m):
        for items in track(order, "importance"):
            (gradient,) = torch.autograd.grad(task_loss(student.model, examples, items), m)
            total += gradient.double().cpu().numpy()
    return np.abs(total / len(order))


def task_loss(model: PreTrainedModel, examples: Examples, items: Sequence[int]) -> torch.Tensor:
    """Cross-entropy of some items, with its gradient: mean over next tokens, or over the images' classes."""
    inputs = stacked(examples, items).to(model.device)
    logits = uncached_logits(model, inputs)
    if isinstance(examples, TokenBatch):
        return cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
    return cross_entropy(logits, examples.labels[list(items)].to(model.device))


@contextmanager
def mixed(student: Unmerged, weights: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Run the model of `student` with `m f(x) + (1 − m) f_cut(x)` for every sublayer f, including its norm.

    `weights()` returns m (2 × L) for attentions and feed-forward blocks; it is called for each sublayer.
    """
    before: list[tuple[nn.Module, Callable[..., None]]] = []
    after: list[tuple[nn.Module, Callable[..., Any]]] = []
    affines = student.merged(range(len(student.blocks)))
    for index, found in find_anatomy(student.decoder, range(len(student.blocks))).items():
        after += [(branch.exit, partial(_scale, index, weights)) for branch in found.parts["attention"].branches]
        norms = found.parts["mlp"].branches[0].norms if "mlp" in found.parts else ()
        layer, block = student.layers[index], student.blocks[index]
        note, mix = _mixing(block, norms, affines[index], weights)
        before.append((layer.get_submodule(block.up.module), note))
        after.append((norms[-1] if norms else layer.get_submodule(block.block or block.out.module), mix))
    with hooked(before=before, after=after):
        yield


def _scale(
    index: int, weights: Callable[[], torch.Tensor], module: nn.Module, args: Any, kwargs: Any, output: Any
) -> Any:
    return with_hidden(output, weights()[0, index] * hidden_of(output))


def _mixing(
    block: FeedForward, norms: Sequence[nn.Module], affine: Affine, weights: Callable[[], torch.Tensor]
) -> tuple[Callable[..., None], Callable[..., torch.Tensor]]:
    given: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append(args[0])

    def mix(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        x, (W, b), m = given.pop(), affine, weights()[1, block.layer]
        cut = linear(x, W.to(x), None if b is None else b.to(x))
        for norm in norms:
            cut = norm.forward(cut)
        return m * output + (1 - m) * cut.view_as(output)

    return note, mix
