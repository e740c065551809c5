"""Remove layers, in memory or file by file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lyapunov_prune.cli.inputs import load_inputs, load_judge, require_ratio, windows_at_once
from lyapunov_prune.cli.jobs import first_goes_on, jobs_folder
from lyapunov_prune.cli.options import DISK, FailAbove, FileTarget, Inputs, Model, layer_indices
from lyapunov_prune.cli.plans import prune_files, tell_written
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.removal import (
    UNJUDGED,
    RemovalOptions,
    require_files,
    require_held,
    require_one_choice,
    settled,
)
from lyapunov_prune.cli.scored import scored_pair
from lyapunov_prune.cli.terminal import show
from lyapunov_prune.export.table import FORMATS
from lyapunov_prune.merging.table import DEFAULT
from lyapunov_prune.ranking.counts import count_of
from lyapunov_prune.ranking.table import CRITERIA
from lyapunov_prune.ranking.table import DEFAULT as BY_SCORES

if TYPE_CHECKING:
    from lyapunov_prune.data.batch import TokenBatch
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.plan import PruningPlan


def prune(
    model: Model,
    *,
    removal: RemovalOptions = RemovalOptions(),
    fail_above: FailAbove = None,
    inputs: Inputs = Inputs(),
    output: FileTarget,
    given: Given = Given(),
) -> None:
    """Remove layers physically, check the removal, and write a plain transformers checkpoint.

    --what width removes the same number of hidden channels from the feed-forward block of every layer, or from every
    expert: a smaller and faster plain checkpoint with as many layers. The width that is left is a multiple of 64, in
    narrow blocks of 8. The last matrix of every block is refitted on one half of the text if the other half and a
    second text (--judge) confirm that it helps.

    --what experts removes the same number of experts from every layer that has experts.

    --what attention and activation remove a part of each layer and write a compact checkpoint: attentions are absent
    and a block without activation is one matrix; it is smaller and faster, and loads with this package or with the
    module beside its weights.

    --mend fits the layer before each gap, without training, to replace the gap: on one half of the calibration text,
    and only if the other half and a second text (--judge) confirm that it helps. --criterion best then compares the
    sets of layers after mending.

    With --device disk, or where the model does not fit in memory or is quantised, the files are pruned. The removal
    check then compares logits only with --device disk, which reads both models one layer at a time. --what width
    --device disk measures the channels in this way too, and refits no matrix.

    --fail-above also measures the perplexity of both models, on text that nothing was chosen on.
    """
    require_one_choice(removal, given)
    removal = settled(removal, given)
    given_plan = None
    if removal.plan_file is not None:
        from lyapunov_prune.pruning.plan import PruningPlan

        given_plan = PruningPlan.load(removal.plan_file)
    stored = FORMATS.make(_format(output, removal.what, given_plan))
    require_held(removal.what, stored, given)
    if not (removal.mend or removal.what == "width" or removal.plan_file):
        given.refuse(UNJUDGED, "judge")
    stored.require_names(model, output)
    why, packed = _why_files(model, inputs, stored.name)
    if why:
        require_files(removal, inputs, why, packed, given)
        from lyapunov_prune.pruning.width import choose_channels

        plan = given_plan
        if removal.what == "width" and removal.remove is not None:  # with one layer in memory at a time
            plan = choose_channels(*load_inputs(model, inputs), removal.remove)
        prune_files(model, removal, plan, why, inputs.disk, stored.name, output)
    else:
        _prune_in_memory(model, removal, given_plan, inputs, stored.name, output, given)
    if fail_above is not None:
        result = scored_pair(model, str(output), inputs)
        show(result, None)
        require_ratio(result, fail_above)


def _why_files(model: str, inputs: Inputs, format: str) -> tuple[str | None, str | None]:
    """Why the files are pruned instead of a model in memory, and how they are quantised; both may be None."""
    from lyapunov_prune.export.copied import too_large
    from lyapunov_prune.export.quantised_copy import quantised
    from lyapunov_prune.models.device import resolve_device

    packed = quantised(model) if format == "plain" else None
    if inputs.disk:
        return f"--device {DISK}", packed
    if inputs.spread:
        return None, packed
    return packed or too_large(model, resolve_device(inputs.device)), packed


def _format(output: Path, what: str, plan: Any) -> str:
    """The format that holds what goes: a .gguf file lacks whole layers alone, and a compact checkpoint lacks parts."""
    if output.suffix == ".gguf":
        return "gguf"
    gone = type(getattr(plan, "gone", None)).__name__
    return "compact" if what in ("attention", "activation") or gone == "PartsGone" else "plain"


def _prune_in_memory(
    model: str, removal: RemovalOptions, given_plan: Any, inputs: Inputs, format: str, output: Path, given: Given
) -> None:
    """Load the model and the text, choose, cut, check and write."""
    # Imported here, because files are pruned in less memory than this takes.
    from lyapunov_prune.budget.alone import rounded_alone
    from lyapunov_prune.data.sources import SELF
    from lyapunov_prune.export.gguf_original import gguf_period
    from lyapunov_prune.export.pruned import write_pruned
    from lyapunov_prune.models.left_out import require_whole
    from lyapunov_prune.models.plain import require_weights
    from lyapunov_prune.pruning.edit import edit_of
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.removed import ChannelsGone, LayersGone, PartsGone

    mend = removal.mend
    if mend and "text" not in given:  # see experiments/6_recovery
        inputs = replace(inputs, text=SELF)
    loaded, batch = load_inputs(model, inputs, plan=given_plan)
    require_weights(loaded.model, "unquantised")  # before anything is measured
    require_whole(loaded.model)
    narrower = removal.what == "width" or isinstance(getattr(given_plan, "gone", None), ChannelsGone)
    if not (mend or narrower):
        given.refuse(UNJUDGED, "judge")
    judged = load_judge(removal.judge, loaded, batch, inputs) if mend or narrower else None
    if removal.layers is not None:
        named = tuple(layer_indices("--layers", removal.layers))
        parts = {"attention": PartsGone((), named), "activation": PartsGone((), (), named, DEFAULT)}
        plan = PruningPlan.given(loaded, parts.get(removal.what, LayersGone(named)))
    elif given_plan is not None:
        plan = given_plan
    else:
        period = gguf_period(model) if format == "gguf" else 1
        if period > 1:
            removal = _by_periods(removal, given)
        plan = _chosen(loaded, batch, removal, period, judged)
    alone = None
    if format != "compact":
        left, chosen = edit_of(loaded, plan).made.model.num_parameters(), removal.layers is None and given_plan is None
        alone = rounded_alone(loaded, left, output, batch if chosen else None)
    first_goes_on()
    how: dict[str, Any] = {"format": format, "mend": mend, "judge": judged, "alone": alone}
    written = write_pruned(loaded, loaded.tokenizer, plan, output, batch, **how)
    tell_written(written, output)


def _by_periods(removal: RemovalOptions, given: Given) -> RemovalOptions:
    """`removal` by a criterion that scores every layer, since the scores of a period add up."""
    if removal.remove is None or not CRITERIA[removal.goes_by].chooses:
        return removal
    given.refuse("chooses layers freely, and llama.cpp reads one period for their windows; leave it out", "criterion")
    given.refuse("has no effect where whole periods go, by their scores; leave it out", "search")
    return replace(removal, criterion=BY_SCORES)


def _chosen(
    loaded: Decoder, batch: TokenBatch, removal: RemovalOptions, period: int, judged: TokenBatch | None
) -> PruningPlan:
    """The plan that measurements on `batch` make, of whole periods if `period` is above 1; searches are shown."""
    from lyapunov_prune.pruning.width import choose_channels
    from lyapunov_prune.ranking.rank import rank
    from lyapunov_prune.ranking.ranking import LayerRanking, require_periods

    remove = removal.remove
    assert remove is not None
    batch_size = windows_at_once(loaded, batch.context)
    if removal.what == "width":
        return choose_channels(loaded, batch, remove, batch_size=batch_size)
    if removal.what != "experts":
        remove = count_of(remove, loaded.structure.num_layers)
        if period > 1:
            require_periods(int(remove), loaded.structure.num_layers, period)
    mend = removal.mend and removal.goes_by == "best"
    searched: dict[str, Any] = {"search": removal.search, "mend": mend, "judge": judged}
    ranking = rank(loaded, batch, **removal.how, **searched, remove=remove, batch_size=batch_size, jobs=jobs_folder())
    if removal.goes_by == "best":
        show(ranking, None)
    return ranking.plan(remove, period) if isinstance(ranking, LayerRanking) else ranking.plan(remove)
