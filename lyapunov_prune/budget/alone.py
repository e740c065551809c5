"""What the dense model would lose, rounded to the bytes that a removal leaves."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.cost import costs
from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.budget.spend import chosen_types, least_of
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.gguf import SUFFIX, source_file
from lyapunov_prune.models.gguf_metadata import gguf_family
from lyapunov_prune.models.size import stored_size
from lyapunov_prune.models.structure import model_name
from lyapunov_prune.pruning.alone import RoundedAlone

_WIDE = 16.0  # bits of a weight in a plain checkpoint
_WINDOWS, _TOKENS = 4, 256  # of the text, for the costs: a backward through whole windows may not fit beside the model


def rounded_alone(decoder: Decoder, left: int, output: Path, batch: TokenBatch | None) -> RoundedAlone | None:
    """The model of `decoder` rounded to the bytes that `left` of its weights take in `output`, without a removal.

    In a `.gguf` file they take the bits that the model's own file has, elsewhere 16. The KL is predicted on the first
    tokens of a few windows of `batch`, if there is one (`cost.costs`). None if llama.cpp cannot hold the model or is
    not installed, and for fewer bits than its types have.
    """
    model, stored = decoder.model, _WIDE
    with suppress(LyapunovPruneError):
        gguf_family(decoder.structure.config)
        if output.suffix == SUFFIX and (size := stored_size(source_file(model_name(model)))) is not None:
            stored = min(stored, size.bits)
        bits, matrices = stored * left / model.num_parameters(), matrices_of(model)
        weights = sum(p.numel() for p in matrices.values())
        if not installed() or decoder.wrapped or bits * weights < 8 * least_of(BLOCKS, matrices):
            return None
        command = f"lyapunov-prune shrink {shlex.quote(model_name(model))} --size {bits:.3g}bpw -o small{SUFFIX}"
        kl = None
        if batch is not None:
            some = replace(batch, ids=batch.ids[:_WINDOWS, :_TOKENS])
            found = list(costs(read(decoder, some), bits=bits))
            pick = chosen_types(found, int(bits * weights / 8))
            kl = float(sum(t.cost[k] for t, k in zip(found, pick, strict=True)))
        return RoundedAlone(bits, kl, command)
    return None
