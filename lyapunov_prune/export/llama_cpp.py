"""Compare what llama.cpp computes with a GGUF file against the model that the file should hold, token by token.

llama.cpp rounds the inputs of quantised matrices to 8 bits, so its numbers differ from PyTorch's. The limit follows
from that: the model runs once more with its inputs rounded in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.data.text import load_text
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.llama_cpp import BATCH, INSTALL, Predictions, ask, installed
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import WINDOW_LIMIT
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.experts import stacks
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import status, warn
from lyapunov_prune.pruning.gate import OnFiles

ENGINE = "same in llama.cpp"
_TOP, _GREEDY = 64, 64
# The limit: a multiple of the KL that rounding the inputs causes, and a least limit in nats.
_TIMES, _LEAST = 3.0, 1e-6
_BLOCK, _SUPER_BLOCK = 32, 256  # how many 8-bit inputs share a scale in llama.cpp, as many as weights share a block
_WIDE = {"F32", "F16", "BF16", "F64"}


def edge_of(decoder: Decoder) -> int:
    """The number of tokens before a wrong attention window shows: the sliding window, else llama.cpp's batch size."""
    window = getattr(decoder.structure.config, "sliding_window", None) or 0
    return window if 0 < window <= WINDOW_LIMIT else BATCH


def compared_text(decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Tokens of the built-in text, twice the edge (`edge_of`) and two batches; random ones without a tokenizer."""
    length = decoder.structure.at_most(2 * max(edge_of(decoder), BATCH) + _GREEDY) - _GREEDY
    if tokenizer is None:
        vocabulary = decoder.structure.config.vocab_size
        return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    return load_text("builtin", tokenizer, tokens=length, context=length).ids[0].tolist()


def engine_checks(
    decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None, most: int | None = None
) -> dict[str, OnFiles]:
    """`engine_check` on at most `most` tokens of the built-in text, by its name; none if llama.cpp is not installed.

    A line on stderr then says so.
    """
    if not installed():
        warn(f"not tried in llama.cpp: {INSTALL}")
        return {}
    ids = compared_text(decoder, tokenizer)[:most]
    return {ENGINE: lambda file: engine_check(file, decoder, ids)}


@in_eval_mode
def engine_check(file: Path, decoder: Decoder, ids: Sequence[int]) -> GateCheck:
    """Whether llama.cpp computes with `file` what `decoder` does.

    The check compares the predictions after each of `ids` and after 64 tokens that llama.cpp generates, by their mean
    KL over each stretch (`stretches`). `measured` is the largest mean, less two standard errors since a stretch may be
    short, divided by its own limit. The width of the
    sliding window is compared as well, because a slightly wrong window changes no prediction of most texts.
    """
    edge = edge_of(decoder)
    with status("llama.cpp, with what was written"):
        try:
            (answers,) = ask([file], [ids], greedy=_GREEDY, top=_TOP, batch=min(BATCH, max(edge, 32)))
        except LyapunovPruneError as error:
            return GateCheck(ENGINE, False, float("inf"), 1.0, str(error).rpartition(";")[0])
    said = answers.windows[0]
    with status("the same text, in this program"):
        ours = _at(decoder, said)
        with rounded_inputs(decoder, file):
            rounded = _at(decoder, said)
    found, noise = _kl(ours, torch.from_numpy(said.values)), _kl(ours, rounded)
    ratios, told = [], []
    for words, part in stretches(edge, len(ids), len(found)).items():
        if len(found[part]):
            measured, rounding = float(found[part].mean()), float(noise[part].mean())
            low = measured - 2 * float(found[part].std(correction=0)) / len(found[part]) ** 0.5
            ratios.append(low / max(_LEAST, _TIMES * rounding))
            told.append(f"{measured:.2g} over {words} (rounding alone {rounding:.2g})")
    worst = max(ratios) if all(map(math.isfinite, ratios)) else math.inf
    detail, window = f"KL a token in nats: {', '.join(told)}", getattr(decoder.structure.config, "sliding_window", 0)
    other = answers.sliding and window and answers.sliding != window
    if other:
        detail = f"its sliding window is {answers.sliding} in llama.cpp, and {window} in the model; {detail}"
    return GateCheck(ENGINE, worst <= 1 and not other, worst, 1.0, detail)


def stretches(edge: int, given: int, predicted: int) -> dict[str, slice]:
    """The stretches that are judged separately: the first `edge` tokens, the rest of the text, the generated tokens."""
    edge = min(edge, given - 1)
    return {
        f"the first {edge} tokens": slice(0, edge),
        f"{given - 1 - edge} tokens after": slice(edge, given - 1),
        f"{predicted - given + 1} tokens written": slice(given - 1, predicted),
    }


@contextmanager
def rounded_inputs(decoder: Decoder, file: Path) -> Iterator[None]:
    """Within the block, inputs of the matrices of `decoder` are rounded as llama.cpp does for the types in `file`.

    Quantised matrices take 8 bits with a scale for every 256 numbers if the file has types in such blocks and the row
    is whole ones, else for every 32; the others take half precision.
    """
    sizes = _shared({tensor.quantisation for tensor in read_header(file).tensors})

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (_rounded(args[0], sizes), *args[1:]), kwargs

    modules = list(decoder.model.modules())
    matrices = [m for m in modules if isinstance(m, nn.Linear | Conv1D) or any(stack.routed for stack in stacks(m))]
    with hooked(before=[(module, before) for module in matrices]):
        yield


def _shared(kinds: set[str]) -> tuple[int, ...]:
    """How many inputs share a scale beside matrices of these types, the most first."""
    blocks = {gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] for kind in kinds - _WIDE}
    return tuple(sorted(blocks, reverse=True))


def _rounded(values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    size = next((each for each in sizes if values.shape[-1] % each == 0), 0)
    if size == 0:
        return values.to(torch.bfloat16).to(values.dtype)
    blocks = values.float().unflatten(-1, (-1, size))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return ((blocks / scale).round() * scale).flatten(-2).to(values.dtype)


def _at(decoder: Decoder, said: Predictions) -> torch.Tensor:
    """The log-probabilities that `decoder` gives to the tokens listed in `said` (predictions × top), float64."""
    ids = torch.from_numpy(said.ids.astype(np.int64))[None].to(decoder.model.device)
    tokens = torch.from_numpy(said.tokens.astype(np.int64))
    found: list[torch.Tensor] = []
    for block in KeptLogits(decoder, [ids]).blocks():
        listed = tokens[len(found) :][: len(block)]
        found += block[: len(listed)].float().log_softmax(-1).cpu().gather(1, listed).double()
    return torch.stack(found)


def _kl(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """KL(ours ‖ theirs) of every row; the tokens that are not listed count as one."""
    theirs = theirs.double()
    rest, other = ((1 - each.exp().sum(-1)).clamp_min(1e-9) for each in (ours, theirs))
    return (ours.exp() * (ours - theirs)).sum(-1) + rest * (rest / other).log()
