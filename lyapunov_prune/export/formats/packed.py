"""The packed format of compressed-tensors: rounded matrices are stored as integers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lyapunov_prune.export.format import Format

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lyapunov_prune.compression.compress import Compressed
    from lyapunov_prune.compression.recipe import CompressionRequest
    from lyapunov_prune.compression.report import CompressionReport


class Packed(Format):
    """Integers of 4 or 8 bits and their scales (`pack-quantized`); faster only in engines with a kernel for them."""

    help = "weights rounded to 4 or 8 bits on grids around 0, packed as integers"
    reference = "compressed-tensors, `pack-quantized`"
    readers = "transformers with compressed-tensors installed, vLLM"
    units = ("bits",)
    streamed = ("compress",)
    symmetric = True
    keeps_dense = True

    def require_method(self, asked: CompressionRequest) -> None:
        from lyapunov_prune.export.packed import require_packed_options

        require_packed_options(asked.method, asked.bits, asked.symmetric, asked.allocation)

    def require_model(self, model: PreTrainedModel, asked: CompressionRequest) -> None:
        from lyapunov_prune.export.packed import require_packable

        require_packable(model, asked.group_size)

    def write(
        self,
        target: Path,
        done: Compressed,
        tokenizer: PreTrainedTokenizerBase,
        title: str,
        dense: PreTrainedModel | None = None,
    ) -> CompressionReport:
        from lyapunov_prune.export.packed import write_packed

        assert dense is not None  # `keeps_dense`
        return write_packed(dense, done, tokenizer, target, title)
