"""Compress a model larger than memory: read a layer, compress it, write it, and pass its output to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.arguments import checked
from lyapunov_prune.checkpoints.cards import write_card
from lyapunov_prune.checkpoints.saving import Shards
from lyapunov_prune.checkpoints.streamed import refilled
from lyapunov_prune.compression.recipe import CompressionRequest, recipe_for
from lyapunov_prune.compression.report import REPORT, CompressionReport
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.packed import FORMAT as PACKED
from lyapunov_prune.export.packed import LOADING, Packing, Scheme, packed_in, require_packable, require_packed_options
from lyapunov_prune.export.table import require_streamed_format
from lyapunov_prune.forward.reading import Readable
from lyapunov_prune.models.decoder import Decoder, Model, wrap
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.size import model_size
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.results.files import folder_beside, require_disk, require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_with


@checked
@in_eval_mode
def compress_on_disk(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    target: str | Path,
    batch: Readable | None = None,
    *,
    format: str = "plain",
    **how: Any,
) -> CompressionReport:
    """Compress the streamed `model` into the folder `target`; `how` are the keyword arguments of `compress`.

    The result equals that of `compress` in memory up to rounding. All windows go through a layer together, twice: once
    for its statistics, then through the compressed layer for the input of the next. So the files are read once, beside
    what the schedule reads, and each layer is written to a file of its own. Memory: one layer and its statistics, and
    the states of the batch.
    The folder holds what `write_model` writes. `format` is a name in `table.FORMATS`: `packed` packs weights on
    symmetric grids like `write_packed`. The files are read back and checked: they hold the written weights bit for bit;
    transformers unpacks packed weights to the same values and finds every tensor it needs.

    Raises LyapunovPruneError as `compress`, and for a model in memory, a format that cannot hold the method's result, a
    schedule that searches, a full disk and a target that is not empty. Raises CheckFailed if the files would load as
    another model. In every case nothing is left there.
    """
    require_streamed_format(format, "compress")
    decoder = wrap(model)
    model = decoder.model
    if decoder.stream is None:
        raise LyapunovPruneError("compress_on_disk takes a streamed model; give one of load_streamed, or use compress")
    require_whole(model)
    asked = checked(CompressionRequest)(**how)
    require_empty(target)
    packing = _packing(model, asked) if format == PACKED else None
    require_disk(target, packing.size(model) if packing else model_size(model).bytes, "the compressed files")
    recipe = recipe_for(model, batch, asked)
    with whole_folder(target) as folder:
        shards = Shards(decoder, tokenizer, folder)

        def write(layer: int) -> None:
            shards.write(layer, packing.stored if packing else None)

        report = recipe.apply(model, write, seen=packing.keep if packing else None)
        if packing:
            packing.write_config(folder, model)
        shards.finish()
        sections: dict[str, str] = {}
        if packing:
            report, sections = replace(report, packed=packed_in(folder, model)), LOADING
        history_with("compress", report.saw, model).save(folder / HISTORY)
        report.save(folder / REPORT)
        title = f"{Path(model.config._name_or_path).name}, compressed"
        write_card(folder, title, report.about(), model, sections)
    return report


def packed_on_disk(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase | None,
    target: Path,
    packing: Packing,
    change: Callable[[PreTrainedModel, int], None],
    dtype: torch.dtype | None,
) -> tuple[Decoder, Path, int]:
    """The streamed `decoder` with every layer as `change` leaves it, its files, and the bytes of its tensors.

    `change` is given the model and a layer that is held, and puts into `packing` what it rounds; `dtype` is that of the
    files, None for the model's. They are packed and checked as those of `compress_on_disk`, in a folder beside `target`
    that is deleted with the model, which is read from them and computes in the dtype that it had.
    """
    before = decoder if dtype is None else refilled(decoder, lambda memory, name: False, dtype)
    with ExitStack() as place:
        folder = place.enter_context(folder_beside(target))
        shards = Shards(before, tokenizer, folder)
        for layer in track(range(decoder.structure.num_layers), "rounding"):
            with layer_held(before.model, layer):
                change(before.model, layer)
                shards.write(layer, packing.stored)
        packing.write_config(folder, before.model)
        found = shards.finish()

        def fill(memory: torch.Tensor, name: str) -> bool:
            found.fill(memory, name)
            return True

        result = refilled(decoder, fill)
        weakref.finalize(result, place.pop_all().close)
    return result, folder, packing.size(before.model)


def _packing(model: PreTrainedModel, asked: CompressionRequest) -> Packing:
    require_packed_options(asked.method, asked.bits, asked.symmetric, asked.allocation)
    if asked.allocation != "uniform":
        raise LyapunovPruneError(
            f"layer by layer all matrices are packed alike ({PACKED}); leave out --allocation, or load the model whole"
        )
    bits, group_size = asked.bits, asked.group_size
    assert bits is not None
    projections = require_packable(model, group_size)
    for p in projections:
        n: Any = model.get_submodule(p.module).in_features
        if group_size is None and n * bits % 32:  # read from its outline, it would get the width of whole words
            raise LyapunovPruneError(
                f"the {n} inputs of {p.module} at {bits:g} bits do not fill words of 32 bits, in which packed rows "
                "are read layer by layer; give --group-size, or load the model whole"
            )
    return Packing({p.module: Scheme(int(bits), group_size) for p in projections})
