"""Remove layers, in memory or file by file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lyapunov_prune.cli.inputs import (
    format_for,
    load_examples,
    load_inputs,
    load_judge,
    windows_at_once,
)
from lyapunov_prune.cli.options import (
    Format,
    Images,
    Json,
    Judge,
    KeepPeriod,
    MaxKL,
    Mend,
    Model,
    ModelOptions,
    OnDisk,
    RankOptions,
    Reduction,
    Stack,
    Stream,
    Target,
    TextOptions,
    counted,
    layer_indices,
    what_option,
)
from lyapunov_prune.cli.plans import plan_for, prune_files, read_plan, tell_written
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import say, show
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.table import FORMATS
from lyapunov_prune.ranking.counts import SPLITS, count_of
from lyapunov_prune.ranking.table import require_ranks

if TYPE_CHECKING:
    from lyapunov_prune.data.batch import TokenBatch
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.results.result import Result


def prune(
    model: Model,
    *,
    remove: Annotated[
        float | None, what_option(help="How many layers, or channels, or experts of each layer; or a share.", **counted)
    ] = None,
    max_kl: MaxKL = None,
    layers: Annotated[str | None, what_option(help="Layers by hand, as 3,7 or 3-7 (counted from 0).")] = None,
    plan_file: Annotated[Path | None, what_option("--plan", help="A plan.json, or a mergekit .yaml of slices.")] = None,
    keep_period: KeepPeriod = False,
    by: RankOptions = RankOptions(),
    reduction: Reduction = None,
    format: Format = "plain",
    mend: Mend = False,
    judge: Judge = None,
    on_disk: OnDisk = False,
    stack: Stack = None,
    stream: Stream = False,
    images: Images = None,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(),
    output: Target,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Remove layers physically, pass the gate, write a plain transformers checkpoint.

    With --what width the same number of hidden channels leaves the feed-forward block of every layer, or every expert:
    a smaller and faster plain checkpoint of as many layers. What stays is a multiple of 64, in narrow blocks of 8. The
    last matrix of every block is refitted on one half of the text, if the other half and a second text (--judge) say
    that it pays.
    With --what experts the same number of experts leaves every layer that has some: a smaller plain checkpoint.
    With --what layers,width or layers,experts both share one budget, --remove 20% of the parameters of the layers: five
    ways to share it, each alone among them, are compared by their measured KL on windows that did not choose.
    With another --what only a part of each layer goes. In a plain checkpoint that costs what it cost: attention and
    MLP are zeroed, an activation is cancelled. With --format compact attentions are gone, and a block without
    activation is one matrix; the checkpoint is smaller and faster, and loads with this package or by the module beside
    its weights.
    With --mend the layer before each gap learns from the calibration text, without training, to stand in for the gap:
    from one half of it, and only if the other half and a second text (--judge) say that it pays. --criterion best then
    compares the sets mended.
    With --on-disk, or where the model does not fit in memory or is quantised, the files are pruned; the gate then
    computes no logits but with --stream, which reads both models one layer at a time.
    """
    if sum(choice is not None for choice in (remove, max_kl, layers, plan_file)) != 1:
        raise LyapunovPruneError("give --remove N, --max-kl X, --layers 3,7 or --plan FILE, one of the four")
    if plan_file is not None:
        given.refuse("has no effect: a plan says what goes; leave it out", "what")
    if images is not None and (plan_file is None or format != "compact" or on_disk or stream or keep_period or mend):
        raise LyapunovPruneError(
            "--images is for the plan of a ViT or DeiT; give --plan FILE and --format compact, and no --on-disk, "
            "--stream, --mend or --keep-period"
        )
    if images is not None:
        given.refuse("is of an encoder-decoder, and --images of a classifier; leave it out", "stack")
    if on_disk or stream:
        source.require_one_place("--on-disk" if on_disk else "--stream")
    parts, together = by.what in ("width", "experts"), by.what in SPLITS
    if parts or together:
        given.refuse(f"is of layers alone, and --what {by.what} of more; give --remove or --plan", "layers")
    if together and not isinstance(remove, float):
        raise LyapunovPruneError(f"--what {by.what} shares the parameters of the layers; give --remove 20% with it")
    if remove is None and max_kl is None:
        chosen = "is of layers that a criterion chooses; give --remove or --max-kl with it"
        given.refuse_record(chosen, RankOptions, but="what")
    if by.what == "width":
        idle = "is of layers, and --what width leaves every layer in its place; leave it out"
        given.refuse_record(idle, RankOptions, but="what", also="keep_period")
    else:
        by = by.settled(remove, periods=keep_period)
        by.require(given)
    if max_kl is not None:
        given.refuse("does not go with --max-kl; give one of the two", "keep_period")
    if by.what != "width" and (remove is not None or max_kl is not None):
        require_ranks(by.goes_by, "layers" if together else by.what, remove=remove, periods=keep_period)
    if (by.what == "activation") != (reduction is not None):
        raise LyapunovPruneError("--what activation and --reduction go together; give both or neither")
    format = format_for(output, format, given)
    stored = FORMATS.make(format)
    if (parts or together) and format != "plain":
        raise LyapunovPruneError(
            f"--what {by.what} writes a plain checkpoint; leave out --format, and give what is written to export"
        )
    if by.what != "layers" and stored.card is not None and not stored.card.parts:
        raise LyapunovPruneError(f"--format {format} holds whole layers; leave out --what, or give another format")
    if mend and (by.what != "layers" or not stored.mends):
        raise LyapunovPruneError(
            "--mend closes the gaps of whole layers in a plain checkpoint; leave out --what and --format"
        )
    unjudged = "is the text that --mend and --what width are judged by; give one of them, or leave it out"
    narrower = "width" in by.what
    if not (mend or narrower or plan_file):
        given.refuse(unjudged, "judge")
    if by.what != "layers":
        given.refuse(f"is of whole layers alone, and --what {by.what} is of more; leave it out", "keep_period")

    from lyapunov_prune.export.copied import too_large
    from lyapunov_prune.export.quantised_copy import quantised
    from lyapunov_prune.models.device import resolve_device

    stored.require_names(model, output)
    packed = quantised(model) if format == "plain" else ""
    why = "--stream" if stream else "--on-disk" if on_disk else ""
    if not why and not source.spread:
        why = packed or too_large(model, resolve_device(source.device))
    if why:
        refused = {
            "--what": by.what != "layers",
            "--remove": remove is not None,
            "--max-kl": max_kl is not None,
            "--format": "prune" not in stored.streamed,
            "--mend": mend,
            "--dtype": source.dtype,
            "--stack": stack is not None,
        }
        for option, needed in refused.items():
            if needed:
                raise LyapunovPruneError(
                    f"{option} needs {'plain weights' if packed else 'the model in memory'} ({why}); give --layers 3,7 "
                    f"or a --plan FILE of rank{'' if packed else ' --stream'}, and no {option}"
                )
        read = "both models' logits on random tokens" if stream else "tensors"
        given.refuse_record(
            f"has no effect where files are pruned ({why}): --layers or --plan says which layers go, and the gate "
            f"compares {read}; leave it out, and score what was written with eval",
            TextOptions,
        )
        if on_disk or stream:  # else it has said that the model does not fit there
            given.refuse("has no effect on what is pruned on disk; leave it out", "device")
        prune_files(model, output, layers, plan_file, keep_period, as_json, why, stream, format)
        return

    # Imported here, since files are pruned in less memory than this takes.
    from lyapunov_prune.export.pruned import write_pruned
    from lyapunov_prune.forward.own_text import SELF
    from lyapunov_prune.models.decoder import wrap_any
    from lyapunov_prune.models.kinds import find_kinds
    from lyapunov_prune.models.left_out import require_whole
    from lyapunov_prune.models.plain import require_unquantised
    from lyapunov_prune.pruning.plan import FIELDS, PruningPlan

    if images is not None:
        assert plan_file is not None
        loaded_model, _, examples = load_examples(model, source, text, images, given)
        classifier = wrap_any(loaded_model)
        plan = plan_for(classifier, read_plan(plan_file))
        written = write_pruned(classifier, None, plan, output, examples, format=format)
        tell_written(written, as_json, output)
        return
    if mend and "text" not in given:  # see experiments/6_recovery
        text = replace(text, text=SELF)
    given_plan = None if plan_file is None else read_plan(plan_file)
    loaded, batch = load_inputs(model, source, text, stack=stack, plan=given_plan)
    batch_size = windows_at_once(loaded, text.context)
    require_unquantised(loaded.model)  # before anything is measured
    require_whole(loaded.model)
    period = find_kinds(loaded.structure).require_period() if keep_period else 1
    narrower = narrower or (isinstance(given_plan, PruningPlan) and bool(given_plan.channels))
    if not (mend or narrower):
        given.refuse(unjudged, "judge")
    judged = load_judge(judge, loaded, batch, text) if mend or narrower else None
    if layers is not None:
        goes: dict[str, Any] = {FIELDS[by.what]: layer_indices("--layers", layers)}
        plan = PruningPlan.given(loaded, **goes, reduction=reduction)
    elif given_plan is not None:
        plan = plan_for(loaded, given_plan)
    else:
        shown = None if as_json else partial(show, as_json=False, written=None)
        by = by.of_model(loaded, given)
        plan = _chosen(loaded, batch, by, remove, max_kl, period, mend, judged, batch_size, shown)
    plan.require_periods(period)
    written = write_pruned(
        loaded,
        loaded.tokenizer,
        plan,
        output,
        batch,
        format=format,
        mend=mend,
        judge=judged,
    )
    tell_written(written, as_json, output, scored=loaded.causal)


def _chosen(
    loaded: Decoder,
    batch: TokenBatch,
    by: RankOptions,
    remove: float | None,
    max_kl: float | None,
    period: int,
    mend: bool,
    judged: TokenBatch | None,
    batch_size: int,
    shown: Callable[[Result], None] | None,
) -> PruningPlan:
    """What goes by a measurement; `shown` is called with searches."""
    from lyapunov_prune.predictions.expectation import expectation
    from lyapunov_prune.pruning.width import choose_channels
    from lyapunov_prune.ranking.budget import remove_under_budget
    from lyapunov_prune.ranking.ranking import LayerRanking, require_periods
    from lyapunov_prune.ranking.split import split_removal
    from lyapunov_prune.ranking.within import most_within

    weighed = None
    if by.what in SPLITS:
        assert remove is not None
        weighed = split_removal(
            loaded,
            batch,
            remove,
            by.what,
            criterion=by.goes_by,
            protect=by.protected(),
            search=by.search,
            batch_size=batch_size,
        )
    elif max_kl is not None and by.what in ("width", "experts"):
        weighed = most_within(loaded, batch, by.what, max_kl, criterion=by.criterion, batch_size=batch_size)
    if weighed is not None:
        if shown is not None:
            shown(weighed)
        return weighed.plan()
    if by.what == "width":
        assert remove is not None
        return choose_channels(loaded, batch, remove, batch_size=batch_size)
    if remove is not None and by.what != "experts":
        remove = count_of(remove, loaded.structure.num_layers)
        if period > 1:
            require_periods(int(remove), loaded.structure.num_layers, period)
    ranking = by.rank(loaded, batch, remove, batch_size, mend=mend, judge=judged)
    if by.goes_by == "best" and shown is not None:
        shown(ranking)
    if remove is not None:
        return ranking.plan(remove, period)
    assert isinstance(ranking, LayerRanking)  # the others ask for --remove
    assert max_kl is not None
    spent = remove_under_budget(loaded, batch, ranking, max_kl, batch_size=batch_size)
    plan = spent.plan()
    if shown is not None:
        shown(spent)
        parts = {"layers": "layers", "attention": "attentions", "mlp": "MLPs"}[by.what]
        if loaded.causal:
            say(expectation().told(float(spent.kl[spent.within - 1]), parts))
    return plan
