"""Write a model in memory as a GGUF file: `export` uses this for checkpoints that never were GGUF.

Tensor names come from the gguf package; `models.gguf_metadata` and `models.gguf_vocabulary` make the header. If the
model was read from a GGUF file that still exists, the tokenizer and description are taken from that file.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import gguf
import torch
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.checkpoints.reloading import RELOADED, GateCheck
from lyapunov_prune.checkpoints.streamed import refilled
from lyapunov_prune.errors import LyapunovPruneError, reported, require_extra
from lyapunov_prune.export.exported import Exported
from lyapunov_prune.export.format import Quantisation
from lyapunov_prune.export.gguf import as_json
from lyapunov_prune.export.gguf_gate import file_reloads
from lyapunov_prune.export.gguf_original import require_file
from lyapunov_prune.export.llama_cpp import ENGINE, engine_checks
from lyapunov_prune.models.decoder import Decoder, runs_model, wrap_any
from lyapunov_prune.models.gguf import HISTORY_KEY, PROVENANCE_KEY, gguf_file
from lyapunov_prune.models.gguf_copy import Piece, bytes_of, write_pieces
from lyapunov_prune.models.gguf_header import Header, Value, number, read_header, text
from lyapunov_prune.models.gguf_metadata import architecture_values, gguf_family
from lyapunov_prune.models.gguf_tensors import put_back, stored_tensors
from lyapunov_prune.models.gguf_vocabulary import CONVERT, vocabulary_values
from lyapunov_prune.models.how import How
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.models.structure import model_name
from lyapunov_prune.pruning.gate import GateReport, OnFiles, attempt
from lyapunov_prune.pruning.provenance import made_by
from lyapunov_prune.results.files import RETRY, folder_beside, require_disk, whole_file
from lyapunov_prune.results.history import history_of, history_with
from lyapunov_prune.results.result import MeasuredOn

ROUNDED = "the same up to rounding"
GREEDY = 64  # tokens that llama.cpp generates in its check
# Keys that are not taken over from the header of the original.
_NEW = ("general.architecture", "general.type", "general.alignment")


@runs_model
def write_gguf(
    model: Plain,
    tokenizer: PreTrainedTokenizerBase | None,
    target: str | Path,
    quantize: Quantisation = "f16",
) -> Exported:
    """Write `model` to the GGUF file `target`, its matrices rounded to `quantize`.

    Raises LyapunovPruneError for a model that llama.cpp's keys cannot describe and for a target that exists. Raises
    CheckFailed if transformers or llama.cpp read something else than the rounded model. In both cases nothing is left
    there.
    """
    require_file(target)
    values = header_values(model, tokenizer, quantize)
    return write_rounded(model, tokenizer, target, values, *rounded_pieces(model, quantize))


def rounded_pieces(
    model: Decoder, quantize: str, chosen: Mapping[str, How] = MappingProxyType({}), target: Path = Path()
) -> tuple[Decoder, list[Piece], float]:
    """A copy of the model that is rounded as `stored_tensors` says, its tensors in a file, and the largest error.

    That of a streamed model is streamed too, from the bytes of the tensors: they are in a file beside `target`, which
    is deleted with the copy.
    """
    family = gguf_family(model.structure.config)
    if model.stream is None:
        result = wrap_any(copy.deepcopy(model.model))
        stored = list(stored_tensors(result, family, quantize, chosen))
        return result, [piece for _, piece, _ in stored], max(share for *_, share in stored)
    placed: dict[str, list[Piece]] = {}
    shares: list[float] = []

    def fill(memory: torch.Tensor, name: str) -> bool:
        if name in placed:
            put_back(name, memory, placed[name], model.model.config, family)
        return name in placed

    result, place = refilled(model, fill), ExitStack()
    weakref.finalize(result, place.close)
    path = place.enter_context(folder_beside(target)) / "tensors"
    with reported(f"cannot write the rounded tensors beside {target}", RETRY), path.open("xb") as file:
        for own, piece, share in stored_tensors(result, family, quantize, chosen):
            source = replace(piece.source, file=path, start=file.tell())
            file.writelines(bytes_of(piece))
            file.flush()
            placed.setdefault(own, []).append(replace(piece, source=source, anew=None))
            shares.append(share)
    return result, [piece for some in placed.values() for piece in some], max(shares)


def write_rounded(
    model: Decoder,
    tokenizer: PreTrainedTokenizerBase | None,
    target: str | Path,
    values: Mapping[str, Value],
    result: Decoder,
    pieces: Sequence[Piece],
    moved: float,
) -> Exported:
    """Write what `rounded_pieces` made of `model` below the header `values`. Raises as `write_gguf` does."""
    family, size = gguf_family(model.structure.config), sum(piece.size for piece in pieces)
    if not family.read:
        require_extra("xllamacpp", "engines", f"reading a file of {model.structure.config.model_type} back")
    require_disk(Path(target).parent, size, "the tensors of the model")
    with whole_file(target) as file:
        write_pieces(file, values, pieces, gguf.GGUF_DEFAULT_ALIGNMENT)
        detail = "distance of the numbers in the file, over the most that rounding moves"
        on_file: dict[str, OnFiles] = {}
        if family.read and result.stream is None:  # else it may not fit in memory
            on_file[RELOADED] = partial(file_reloads, result, within=1e-6)
        context = values[f"{family.architecture}.context_length"].read()
        on_file |= engine_checks(result, tokenizer, max(2, context - GREEDY))
        found = [attempt(name, partial(check, file)) for name, check in on_file.items()]
        checks = GateCheck(ROUNDED, moved <= 1, moved, 1.0, detail), *found
        GateReport(checks).require_passed("the file", CONVERT)
    kinds = Counter(gguf.GGMLQuantizationType(piece.kind).name for piece in pieces)
    not_run = tuple(name for name in (RELOADED, ENGINE) if name not in on_file)
    return Exported(model_name(model.model), "gguf", dict(kinds), size, checks, not_run)


def header_values(
    model: Decoder, tokenizer: PreTrainedTokenizerBase | None, quantize: str, step: str = "export", *saw: MeasuredOn
) -> dict[str, Value]:
    """The header of a file of which most is in the type `quantize`, written by `step`, whose choices `saw` these texts.

    Raises LyapunovPruneError for a model that it cannot describe.
    """
    require_whole(model.model)
    if model.wrapped:
        raise LyapunovPruneError(f"llama.cpp keeps what reads pictures or sound in a file of its own; {CONVERT}")
    config = model.structure.config
    values = architecture_values(config, gguf_family(config), Path(model_name(model.model)).stem)
    values |= _other_values(model, tokenizer, quantize)
    return values | {HISTORY_KEY: text(as_json(history_with(step, saw, model.model)))}


def _origin(decoder: Decoder) -> Header | None:
    """The header of the GGUF file that the model's history names; None if there is no such file any more."""
    first = next((step.source for step in history_of(decoder.model).steps), decoder.model.config._name_or_path)
    try:
        file = gguf_file(first)
        header = None if file is None or not file.is_file() else read_header(file)
    except LyapunovPruneError:  # the file is gone, or another file has its name
        return None
    tokens = None if header is None else header.values.get("tokenizer.ggml.tokens")
    return header if tokens is not None and tokens.length == decoder.structure.config.vocab_size else None


def _other_values(decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None, quantize: str) -> dict[str, Value]:
    """The keys beside the architecture's: the tokenizer, the description, and how the model was made."""
    origin = _origin(decoder)
    kinds = {each.name.removeprefix("MOSTLY_").removeprefix("ALL_"): each for each in gguf.LlamaFileType}
    file_type = next(each for name, each in kinds.items() if name.startswith(quantize.upper()))  # Q4_K: that of Q4_K_S
    if origin is None:
        values = vocabulary_values(tokenizer, decoder.structure.config.vocab_size)
    else:
        taken = ("tokenizer.", "general.")
        values = {key: value for key, value in origin.values.items() if key.startswith(taken) and key not in _NEW}
    values |= {
        "general.file_type": number(file_type),
        "general.quantization_version": number(gguf.GGML_QUANT_VERSION),
    }
    made = made_by(decoder.model.config._name_or_path)
    if made is not None:
        values[PROVENANCE_KEY] = text(as_json(made))
    return values
