"""The gate for a compact model: the four checks of the removal gate, and one in a process without this package.

1. Its logits equal those of the original with layers skipped, sublayers silenced and activations replaced by hooks.
2. Decoding step by step with a cache gives the logits of the uncached forward.
3. Saved and reloaded by this package's copy of its module, it is the same model.
4. The same holds in a process that cannot import this package and runs the module beside the weights.
5. Parameters and bytes on disk fell by exactly what was cut.

If the map of the hidden vector is known, a sixth check compares each merged matrix with it (`merged_check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.checkpoints.reloading import ELSEWHERE, RELOADED, GateCheck, elsewhere_check
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.examples import as_examples
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.export.compact import Cuts, block_paths, cut_places, cuts_of, merged_path
from lyapunov_prune.forward.anatomy import find_anatomy, find_attentions, silent
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.merging.replaced import hidden_replaced
from lyapunov_prune.models.decoder import Decoder, InMemoryAny, runs_models
from lyapunov_prune.models.feedforward import Affine, FeedForward, find_feedforward
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.pruning.counting import COUNTED, fallen_check, held_by, place, sizes_in_memory
from lyapunov_prune.pruning.gate import CACHED, SKIPPED, Check, Gate, GateReport, OnFiles, bytes_in
from lyapunov_prune.pruning.provenance import save
from lyapunov_prune.pruning.removal import MERGED, merged_check
from lyapunov_prune.results.history import HISTORY, history_of


@runs_models
def verify_compact(
    original: InMemoryAny,
    compact: InMemoryAny,
    cuts: Cuts,
    batch: TokenBatch | ImageBatch | torch.Tensor | None = None,
    *,
    checkpoint: str | Path | None = None,
    elsewhere: bool = True,
) -> GateReport:
    """Put `compact`, made from `original` by `cuts`, through the five checks.

    An image classifier has no cache to check. The inputs are random tokens or images, and the start of `batch`.
    `checkpoint` is a folder in which `compact` is saved already; without it the model is saved to a temporary folder.
    The process without this package takes some seconds to start; `elsewhere=False` skips it.
    """
    given = None if batch is None else as_examples(original, batch)
    inputs = sample_inputs(original, given)
    gate = Gate(original, compact, inputs, partial(cut_by_hooks, cuts=cuts), computed=bool(cuts.hidden), batch=given)
    checks: dict[str, Check] = {SKIPPED: partial(gate.same, "logits against the original cut by hooks")}
    if original.model.can_generate():
        checks[CACHED] = gate.cached
    if cuts.hidden:
        checks[MERGED] = partial(_merged, gate, cuts)
    on_files: dict[str, OnFiles] = {RELOADED: gate.reloads}
    if elsewhere:
        on_files[ELSEWHERE] = partial(elsewhere_check, compact.model, inputs=inputs)
    on_files[COUNTED] = partial(_counted, gate, cuts)
    return gate.report(checks, on_files, checkpoint)


@contextmanager
def cut_by_hooks(decoder: Decoder, cuts: Cuts) -> Iterator[None]:
    """Within the block, every forward computes what the cut model would, while all modules stay in place.

    The output of a removed attention becomes zero. The input of the last matrix of a merged feed-forward block becomes
    τ(x), so no merged matrix is trusted; if τ is not known, the output of the block becomes `W x + b` of its input.
    """
    structure = decoder.structure
    layers = structure.layers
    known = list(_known(structure, cuts).values())
    before: list[tuple[nn.Module, Callable[..., None]]] = []
    after: list[tuple[nn.Module, Callable[..., Any]]] = []
    unknown = cuts.merged.keys() - cuts.hidden.keys()
    found = find_anatomy(decoder, sorted({*cuts.attention, *unknown}))
    for index, paths in block_paths(decoder, {i: found[i] for i in unknown}).items():
        note, replace = _replacement(cuts.merged[index])
        before.append((layers[index].get_submodule(paths[0]), note))
        after.append((layers[index].get_submodule(paths[-1]), replace))
    with (
        silent(*find_attentions(decoder, {i: found[i] for i in cuts.attention}).values()),
        hooked(before=before, after=after),
        hidden_replaced(layers, known),
        skipped(structure, cuts.remove),
    ):
        yield


def _replacement(affine: Affine) -> tuple[Callable[..., None], Callable[..., torch.Tensor]]:
    given: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append(args[0])

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> torch.Tensor:
        x, (W, b) = given.pop(), affine
        return linear(x, W.to(x), None if b is None else b.to(x))

    return note, replace


def _known(structure: Structure, cuts: Cuts) -> dict[int, tuple[FeedForward, HiddenMap]]:
    return {i: (find_feedforward(structure, i), tau) for i, tau in cuts.hidden.items()}


def _merged(gate: Gate, cuts: Cuts) -> GateCheck:
    structure, made = gate.reference.structure, gate.result.layers
    kept = [i for i in range(structure.num_layers) if i not in cuts.remove]

    def stored(index: int) -> Affine:
        new = kept.index(index)
        matrix: Any = made[new].get_submodule(merged_path(cuts_of(gate.result)[new]))
        return matrix.weight.detach(), None if matrix.bias is None else matrix.bias.detach()

    known = _known(structure, cuts).items()
    rows = ((i, block.parts(structure.layers[i]).out, tau, stored(i)) for i, (block, tau) in known)
    return merged_check(rows, "a merged block")


def _counted(gate: Gate, cuts: Cuts, folder: Path) -> GateCheck:
    original, structure = gate.reference.model, gate.reference.structure
    sizes = sizes_in_memory(original)
    gone = tuple(
        f"{structure.layers_path}.{index}.{path}"
        for index, places in enumerate(cut_places(gate.reference, cuts))
        for path in ([""] if index in cuts.remove else [f"{path}." for path in places])
    )
    tensors = original.state_dict(keep_vars=True)
    stays = {place(t) for name, t in tensors.items() if not name.startswith(gone)}
    parameters, size = held_by(original, sizes, {name: Fraction(place(t) not in stays) for name, t in tensors.items()})
    new = sum(t.numel() for affine in cuts.merged.values() for t in affine if t is not None)
    before = original.num_parameters(), sum(size for _, size in sizes)
    left = parameters - new, size - new * original.dtype.itemsize
    layers = structure.num_layers - len(cuts.remove)
    return fallen_check(before, left, layers, gate.result, bytes_in(folder))


def save_compact(
    folder: Path,
    decoder: Decoder,
    compact: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    cuts: Cuts,
    batch: TokenBatch | ImageBatch | None,
) -> GateReport:
    """Save `compact`, made from `decoder` by `cuts`, with its history in `folder`, then put it through the gate there.

    Raises CheckFailed if the gate fails. The caller must then delete `folder`, as `whole_folder` does.
    """
    save(compact, tokenizer, folder)
    gate = verify_compact(decoder, compact, cuts, batch, checkpoint=folder)
    gate.require_passed()
    history_of(compact).save(folder / HISTORY)
    return gate
