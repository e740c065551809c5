"""A GGUF file: the block types of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.budget.storage import Chosen, RoundedModel, Storage
from lyapunov_prune.export.gguf_whole import header_values, rounded_pieces, write_rounded
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.ggml import Kind, bits_of, dequantised, fits, quantised
from lyapunov_prune.models.gguf import DESCRIPTION_KEY
from lyapunov_prune.models.gguf_header import text
from lyapunov_prune.models.how import Stored
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.worth import Worth

# All that llama.cpp runs from 2 to 16 bits. Types of fewer bits are beyond what second order predicts.
KINDS = (
    *(Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.Q2_K, Kind.IQ3_XXS, Kind.IQ3_S, Kind.Q3_K),
    *(Kind.IQ4_XS, Kind.MXFP4, Kind.IQ4_NL, Kind.Q4_0, Kind.Q4_K, Kind.Q4_1),
    *(Kind.Q5_0, Kind.Q5_K, Kind.Q5_1, Kind.Q6_K, Kind.Q8_0, Kind.BF16, Kind.F16),
)
# Types of fewer bits than this share of the mean are not tried, to save time: they are the slowest to write.
_NARROW = 0.6
_LEAST = 0.35  # one narrower type stays, for matrices that have to make room for others: of at least this share
# One type for all, as the sizes that are shown beside the one that was asked for.
_SIZES = (Kind.Q2_K, Kind.Q3_K, Kind.IQ4_XS, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0)
_NEAR = 0.75  # the narrowest of them, as a share of the bits asked for: the costs leave out some that are narrower
_PLACE = 160  # bytes in a header for a tensor's name and place, and the space up to the next one, at most


class Blocks(Storage):
    """Vectors and routers stay float32."""

    def kinds_for(self, matrix: str, columns: int, bits: float = 0.0) -> Sequence[Kind]:
        fitting = [kind for kind in KINDS if fits(kind, columns)]
        narrow = min((kind for kind in fitting if bits_of(kind) >= _LEAST * bits), key=bits_of)
        return [kind for kind in fitting if kind is narrow or bits_of(kind) >= _NARROW * bits]

    def alike(self, bits: float) -> Sequence[Kind]:
        return [kind for kind in _SIZES if bits_of(kind) >= _NEAR * bits]

    def bits_of(self, kind: Kind) -> float:
        return bits_of(kind)

    def block(self, kind: Kind) -> int:
        return GGML_QUANT_SIZES[kind][0]

    def size_in(self, kind: Kind, shape: Sequence[int]) -> int:
        return int(prod(shape) * bits_of(kind)) // 8

    def stored(self, W: np.ndarray, kind: Kind, importance: np.ndarray) -> Stored:
        return (torch.from_numpy(quantised(W, kind, importance)),)

    def read(self, stored: Stored, kind: Kind) -> np.ndarray:
        return dequantised(stored[0].numpy(), kind)

    def head(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None) -> int:
        tensors = list(decoder.model.parameters())
        values = header_values(decoder, tokenizer, "f16")
        head = sum(len(key) + 16 + len(value.raw) for key, value in values.items()) + _PLACE * len(tensors)
        weights = sum(p.numel() for p in matrices_of(decoder.model).values())
        return head + 4 * (sum(p.numel() for p in tensors) - weights)

    def made(
        self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None, target: str | Path, chosen: Chosen
    ) -> RoundedModel:
        matrices = matrices_of(decoder.model)
        taken: dict[str, int] = {}
        for name, (kind, *_) in chosen.items():
            taken[kind.name] = taken.get(kind.name, 0) + self.size_in(kind, matrices[name].shape)
        pieces = rounded_pieces(decoder, "f16", chosen, Path(target))

        def write(saw: Sequence[MeasuredOn], worth: Worth) -> int:
            values = header_values(decoder, tokenizer, max(taken, key=taken.__getitem__), "shrink", *saw)
            values[DESCRIPTION_KEY] = text(worth.told())
            return write_rounded(decoder, tokenizer, target, values, *pieces).size

        return RoundedModel(pieces[0], write)


BLOCKS = Blocks()
