"""The command that says where the error of a compressed checkpoint comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lyapunov_prune.cli.inputs import begun_run, draw_report, load_inputs, windows_at_once
from lyapunov_prune.cli.options import (
    IN_MEMORY,
    Json,
    Model,
    ModelOptions,
    Output,
    Stream,
    TextOptions,
    what_option,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import note, show
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError

if TYPE_CHECKING:
    from lyapunov_prune.explaining.kv_cache import CacheBits


def explain(
    dense: Model,
    compressed: Annotated[
        str | None, typer.Argument(help="Made from DENSE: packed, GGUF, sparsified, rounded, pruned, mended, healed.")
    ] = None,
    *,
    kv_bits: Annotated[
        int | None,
        what_option(help="In the place of COMPRESSED: DENSE with keys and values rounded to 8, 4 or 2 bits."),
    ] = None,
    profile: Annotated[
        Path | None,
        what_option(help="profile.json of DENSE, whose ρ is set beside that of this very error."),
    ] = None,
    stream: Stream = False,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(tokens=2048, context=256),
    output: Output = None,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Where the error of COMPRESSED comes from: layer by layer inherited, added or amplified; writes explanation.json.

    And what each layer costs at the prediction: KL and perplexity when it alone is compressed, and when all others
    are. A layer that is gone is told by the provenance of its checkpoint. Of the layers to blame every matrix, with its
    certified bound. Exit code 1 where the parts do not add up or a bound is violated.
    """
    from lyapunov_prune.data.unseen import require_unseen
    from lyapunov_prune.explaining.cost import told_cost
    from lyapunov_prune.explaining.explain import explain as measured
    from lyapunov_prune.explaining.explanation import EXPLANATION
    from lyapunov_prune.explaining.kv_cache import with_rounded_cache
    from lyapunov_prune.forward.reading import read
    from lyapunov_prune.models.tokenizers import require_same_ids
    from lyapunov_prune.profiles.profile import LayerProfile

    if (compressed is None) == (kv_bits is None):
        raise LyapunovPruneError("give COMPRESSED, or --kv-bits in its place")
    if stream:
        given.refuse(IN_MEMORY, "kv_bits")
    known = None if profile is None else LayerProfile.load(profile).contraction
    run = begun_run(output, dense, EXPLANATION)
    loaded, batch = load_inputs(dense, source, text, "evaluation", stream=stream)
    other = (
        source.load(compressed, stream=stream) if compressed else with_rounded_cache(loaded, cast("CacheBits", kv_bits))
    )
    for model in (loaded.model, other.model):
        require_unseen(model, batch)
    reading = read(loaded, batch)
    require_same_ids(loaded.tokenizer, other.tokenizer, (dense, compressed or dense), reading.scorer.vocabulary)
    if not as_json:
        note(told_cost(reading))
    result = measured(
        loaded, other, reading, profile=known, batch_size=windows_at_once(loaded, text.context), folder=run
    )
    written = result.save(run / EXPLANATION)
    draw_report(run)
    show(result, as_json, written)
    for part in () if as_json else result.further():
        show(part, as_json, None, kept=written)
    if not (result.adds_up and (result.sublayers is None or result.sublayers.adds_up)):
        raise CheckFailed(f"the parts of the error do not add up; see {written}")
    if result.matrices is not None and result.matrices.violations:
        raise CheckFailed(f"{len(result.matrices.violations)} bounds are violated; see {written}")
