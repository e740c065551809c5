"""The plan that a file holds, files that are pruned by one, and what was written."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lyapunov_prune.cli.options import DISK, layer_indices
from lyapunov_prune.cli.removal import RemovalOptions
from lyapunov_prune.cli.terminal import follow, say, show
from lyapunov_prune.errors import LyapunovPruneError

if TYPE_CHECKING:
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.provenance import Provenance


def tell_written(provenance: Provenance, output: Path, *, streamed: bool = False) -> None:
    show(provenance, output, kept=_record(output))
    device = f" --device {DISK}" if streamed else ""  # the models may not fit in memory
    dense = shlex.quote(provenance.source)
    follow(f"eval {shlex.quote(str(output))} --against {dense}{device}")


def _record(output: Path) -> Path | None:
    """The file that holds the provenance; a .gguf file has it in its header."""
    from lyapunov_prune.pruning.provenance import PROVENANCE

    return output / PROVENANCE if output.is_dir() else None


def prune_files(
    model: str,
    removal: RemovalOptions,
    given: PruningPlan | None,
    why: str,
    stream: bool,
    format: str,
    output: Path,
) -> None:
    """Prune the files of `model` by the layers that are named, or by the plan `given`, and say what was written."""
    from lyapunov_prune.checkpoints.outline import read_outline
    from lyapunov_prune.export.copied import prune_on_disk
    from lyapunov_prune.export.gguf import prune_gguf
    from lyapunov_prune.export.gguf_original import gguf_identity
    from lyapunov_prune.export.quantised_copy import (
        plan_for_quantised,
        prune_quantised,
        read_quantised,
        stays_quantised,
    )
    from lyapunov_prune.models.loading import checkpoint_folder
    from lyapunov_prune.pruning.plan import PruningPlan

    read = "on files, and on logits of streamed models" if stream else "on files"
    checkpoint = None
    remove: Callable[[PruningPlan, Path], Provenance]
    if format == "gguf":
        identity = gguf_identity(model, planned=given is not None)
        remove, read = partial(prune_gguf, model), "on files"
    elif model.endswith(".gguf"):
        raise LyapunovPruneError(f"{model} is pruned on disk as a GGUF file; end --output in .gguf")
    elif stays_quantised(model):
        checkpoint = read_quantised(checkpoint_folder(model), model)
        identity = checkpoint.identity
        remove = partial(prune_quantised, checkpoint)
        read = "on bytes and settings; the logits were not compared"
    else:
        outline = read_outline(checkpoint_folder(model), model)
        identity = outline.identity
        remove = partial(prune_on_disk, outline, stream=stream)
    if removal.layers is not None:
        plan = PruningPlan.given(identity, layer_indices("--layers", removal.layers))
    else:
        assert given is not None
        plan = given
        if checkpoint is not None:
            plan = plan_for_quantised(checkpoint, plan)
        else:
            plan.require_model(identity)
    provenance = remove(plan, output)
    say(f"Pruned on disk ({why}); the removal checks {read}:")
    if checkpoint is None:
        tell_written(provenance, output, streamed=format != "gguf")
    else:  # it may not load here, so that no eval of it is named
        show(provenance, output, kept=_record(output))
