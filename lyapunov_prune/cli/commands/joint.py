"""The command that removes attentions and activations together."""

from __future__ import annotations

from typing import Annotated

from lyapunov_prune.arguments import Range
from lyapunov_prune.cli import choices
from lyapunov_prune.cli.inputs import draw_report, jobs_folder, load_examples
from lyapunov_prune.cli.options import (
    ABOVE_ZERO,
    Images,
    Json,
    Model,
    ModelOptions,
    Resume,
    Target,
    TextOptions,
    counted,
    one_of,
    what_option,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import say, show
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.merging.table import DEFAULT, REDUCTIONS

_RANK = 8
_IMAGES = 32  # in a step, and in a forward


def joint(
    model: Model,
    *,
    remove: Annotated[
        float | None, ABOVE_ZERO, what_option(help="How many attentions and activations go together.", **counted)
    ] = None,
    speedup: Annotated[
        float | None,
        Range(1, above=True),
        what_option(help="Instead of --remove: how many times as fast a forward must be."),
    ] = None,
    reduction: Annotated[
        choices.Reduction,
        what_option(help=one_of(REDUCTIONS, "What an activation is replaced by.")),
    ] = DEFAULT,
    steps_per_point: Annotated[int, what_option(min=1, help="Training steps of each point of the map.")] = 12,
    recover: Annotated[int, what_option(min=1, help="Training steps of the chosen pair.")] = 100,
    images: Images = None,
    source: ModelOptions = ModelOptions(dtype="float32"),
    text: TextOptions = TextOptions(tokens=40960, context=256),
    resume: Resume = False,
    output: Target,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Remove attentions and activations, so many of each as a map of the score after recovery says.

    Writes a compact checkpoint, with joint.json, plan.json and a report. Interrupted, it goes on with the same --output
    and --resume.
    """
    source.require_one_place("joint")
    if (remove is None) == (speedup is None):
        raise LyapunovPruneError("give one budget: --remove K or --speedup S")

    from lyapunov_prune.data.slices import slices
    from lyapunov_prune.joint.recovery import Recipe
    from lyapunov_prune.joint.run import remove_jointly
    from lyapunov_prune.models.structure import find_layers
    from lyapunov_prune.ranking.counts import count_of
    from lyapunov_prune.results.files import require_empty

    require_empty(output)
    folder = jobs_folder("joint", model, output)
    what = "attentions and activations"
    dense, tokenizer, data = load_examples(model, source, text, images, given)
    done = remove_jointly(
        dense,
        tokenizer,
        slices(data),
        output,
        remove=remove if remove is None else count_of(remove, 2 * find_layers(dense).num_layers, what),
        speedup=speedup,
        reduction=reduction,
        steps=steps_per_point,
        recover_steps=recover,
        recipe=Recipe(batch=1 if images is None else _IMAGES, rank=_RANK),
        folder=folder,
        resume=resume,
        batch_size=1 if images is None else _IMAGES,
    )
    draw_report(output)
    show(done, as_json, output, kept=output / "joint.json")
    if not as_json:
        say(f"Report: {output / 'report.html'}")
