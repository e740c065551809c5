"""The gate for a compact model: the four checks of the removal gate, and a fifth where this package is not.

1. Its logits are those of the original with layers skipped, branches silenced and activations replaced by hooks.
2. Decoding step by step with a cache gives the logits of the uncached forward.
3. Saved and reloaded by this package's copy of its module it is the same model.
4. So it is in a process that cannot import this package and runs the module beside the weights.
5. Parameters and bytes on disk fell by exactly what was cut.

Where the map of the hidden vector is known, a sixth holds each merged matrix against it (`merge_gate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from lyapunov_prune.arguments import checked
from lyapunov_prune.checkpoints.elsewhere import ELSEWHERE, elsewhere_check
from lyapunov_prune.checkpoints.reloading import RELOADED, GateCheck, reload_check
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.forward.hooks import hidden_of, skipped, with_hidden
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.merging.reductions import HiddenMap
from lyapunov_prune.merging.replaced import hidden_replaced
from lyapunov_prune.models.compact import LAYOUTS
from lyapunov_prune.models.decoder import wrap_any
from lyapunov_prune.models.feedforward import Affine, FeedForward, read_feedforward
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure, find_layers, in_eval_mode
from lyapunov_prune.pruning.compact import Cuts, cut_places
from lyapunov_prune.pruning.counting import COUNTED, fallen_check, held_by, place, sizes_in_memory
from lyapunov_prune.pruning.gate import (
    CACHED,
    SKIPPED,
    GateReport,
    attempt,
    bytes_in,
    cache_check,
    crashed,
    same_check,
    saved_in,
    seen_by,
)
from lyapunov_prune.pruning.merge_gate import MERGED, logits_limit, merged_blocks, merged_check


@checked
@in_eval_mode
@torch.no_grad()
def verify_compact(
    original: PreTrainedModel,
    compact: PreTrainedModel,
    cuts: Cuts,
    batch: TokenBatch | ImageBatch | torch.Tensor | None = None,
    *,
    checkpoint: str | Path | None = None,
    elsewhere: bool = True,
) -> GateReport:
    """Put `compact`, made of `original` by `cuts`, through the five checks; one for images has no cache to check.

    On random tokens or images and on the start of `batch`. `checkpoint` is a folder where `compact` has been
    saved; without it the model is saved to a temporary folder. The process without this package takes some seconds to
    start; `elsewhere=False` leaves it out.
    """
    inputs = sample_inputs(wrap_any(original), batch)
    checks = [attempt(SKIPPED, lambda: _same(original, compact, cuts, inputs))]
    if original.can_generate():
        checks.append(attempt(CACHED, lambda: cache_check(original, compact, inputs)))
    if cuts.hidden:
        checks.append(attempt(MERGED, lambda: _merged(original, compact, cuts)))
    try:
        with saved_in(compact, checkpoint) as folder:
            checks.append(attempt(RELOADED, lambda: reload_check(compact, folder, inputs)))
            if elsewhere:
                checks.append(attempt(ELSEWHERE, lambda: elsewhere_check(compact, folder, inputs)))
            checks.append(attempt(COUNTED, lambda: _counted(original, compact, cuts, folder)))
    except Exception as error:  # it cannot even be saved
        checks.append(crashed(RELOADED, error))
    return GateReport(tuple(checks), seen_by(original, batch, inputs))


@contextmanager
def cut_by_hooks(model: PreTrainedModel, cuts: Cuts) -> Iterator[None]:
    """Every forward inside the block goes as if `model` were cut, in which all modules stay.

    What an attention returns becomes zero. What enters the last matrix of a feed-forward block becomes τ(x), so that no
    merged matrix is trusted; where τ is not known, what the block returns becomes `W x + b` of what it was given.
    """
    structure = find_layers(model)
    layers, layout = structure.layers, LAYOUTS[structure.model_type]
    known = list(_known(structure, cuts).values())
    before: list[tuple[nn.Module, Callable[..., None]]] = []
    after: list[tuple[nn.Module, Callable[..., Any]]] = []
    for index in cuts.attention:
        after.append((layers[index].get_submodule(layout.attention), _zero))
    for index, affine in cuts.merged.items():
        if index not in cuts.hidden:
            note, replace = _replacement(affine)
            before.append((layers[index].get_submodule(layout.block[0]), note))
            after.append((layers[index].get_submodule(layout.block[-1]), replace))
    with hooked(before=before, after=after), hidden_replaced(layers, known), skipped(structure, cuts.remove):
        yield


def _zero(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return with_hidden(output, torch.zeros_like(hidden_of(output)))


def _replacement(affine: Affine) -> tuple[Callable[..., None], Callable[..., torch.Tensor]]:
    given: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append(args[0])

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> torch.Tensor:
        x, (W, b) = given.pop(), affine
        return linear(x, W.to(x), None if b is None else b.to(x))

    return note, replace


def _same(original: PreTrainedModel, compact: PreTrainedModel, cuts: Cuts, inputs: Sequence[torch.Tensor]) -> GateCheck:
    with cut_by_hooks(original, cuts):
        reference = KeptLogits(wrap_any(original), inputs)
    limit = logits_limit(compact, bool(cuts.hidden))
    return same_check(compact, list(inputs), reference, limit, "logits against the original cut by hooks")


def _known(structure: Structure, cuts: Cuts) -> dict[int, tuple[FeedForward, HiddenMap]]:
    layers, kind, config = structure.layers, structure.model_type, structure.config
    return {i: (read_feedforward(layers, i, kind, config), tau) for i, tau in cuts.hidden.items()}


def _merged(original: PreTrainedModel, compact: PreTrainedModel, cuts: Cuts) -> GateCheck:
    structure, made = find_layers(original), find_layers(compact).layers
    kept = [i for i in range(structure.num_layers) if i not in cuts.remove]

    def stored(index: int) -> Affine:
        matrix: Any = made[kept.index(index)].get_submodule(LAYOUTS[structure.model_type].block[0])
        return matrix.weight.detach(), None if matrix.bias is None else matrix.bias.detach()

    return merged_check(merged_blocks(structure.layers, _known(structure, cuts), stored), "a merged block")


def _counted(original: PreTrainedModel, compact: PreTrainedModel, cuts: Cuts, folder: Path) -> GateCheck:
    structure, sizes = find_layers(original), sizes_in_memory(original)
    gone = tuple(
        f"{structure.layers_path}.{index}.{path}"
        for index, places in enumerate(cut_places(original, cuts))
        for path in ([""] if index in cuts.remove else [f"{path}." for path in places])
    )
    tensors = original.state_dict(keep_vars=True)
    stays = {place(t) for name, t in tensors.items() if not name.startswith(gone)}
    parameters, size = held_by(original, sizes, {name: Fraction(place(t) not in stays) for name, t in tensors.items()})
    new = sum(t.numel() for affine in cuts.merged.values() for t in affine if t is not None)
    left = parameters - new, size - new * original.dtype.itemsize
    return fallen_check(original, sizes, compact, bytes_in(folder), left, structure.num_layers - len(cuts.remove))
