"""One-shot compression of every matrix of a model in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.arguments import Count, Share
from lyapunov_prune.compression.masks import Pattern
from lyapunov_prune.compression.recipe import CompressionRequest, recipe_for
from lyapunov_prune.compression.report import CompressionReport
from lyapunov_prune.forward.reading import Readable
from lyapunov_prune.models.decoder import runs_model
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.result import Reported


@dataclass(frozen=True, repr=False)
class Compressed(Reported):
    """A compressed model (plain: same class, same shapes) and what was done to it."""

    model: PreTrainedModel
    report: CompressionReport


@runs_model
def compress(
    model: Plain,
    batch: Readable | None = None,
    *,
    method: str,
    sparsity: float | None = None,
    rank: int | None = None,
    bits: float | None = None,
    allocation: str | Allocation = "uniform",
    schedule_options: Mapping[str, Any] | None = None,
    pattern: Pattern | str | None = None,
    group_size: int | None = None,
    symmetric: bool = False,
    weighted: bool = False,
    correction: Share = 0.0,
    batch_size: Count = 1,
) -> Compressed:
    """A copy of `model` with every matrix of its layers compressed by `method` (`METHODS`).

    Give either one of `sparsity` (share of the entries, or of the parameters for low-rank methods), `rank` and `bits`,
    with the name of a schedule and its parameters in `schedule_options` (`{"least": 0.7}`), or an Allocation that says
    how much of each matrix. Methods that use activations take them from `batch`, layer by layer, with the earlier
    layers already compressed (`Recipe.apply`). A matrix whose amount is 0, the embeddings and the head are not changed.

    - `pattern` (keep, of), a pair or `2:4`: keep `keep` of every `of` consecutive inputs; the sparsity need not be
      given;
    - `symmetric`: a method that rounds uses grids around 0 (`grids.stepped`), which `packed.write_packed` can write as
      integers;
    - `weighted` (sparsegpt and gptq): calibration tokens count by how far an error there moves the prediction; takes a
      backward pass (`second_order.SecondOrder`);
    - `correction` α (sparsegpt and gptq): move each matrix toward the outputs of the dense model; takes one more
      forward of it.

    Memory: a copy of the model, and the statistics of one layer. Raises LyapunovPruneError for amounts and options that
    the method does not have, a missing text, and matrices shared between layers.
    """
    how = (allocation, schedule_options, pattern, group_size, symmetric, weighted, correction)
    recipe = recipe_for(model, batch, CompressionRequest(method, sparsity, rank, bits, *how))
    small = copy.deepcopy(model.model)
    report = recipe.apply(small, batch_size=batch_size)
    add_step(small, "compress", report.saw, model.model)
    return Compressed(small, report)
