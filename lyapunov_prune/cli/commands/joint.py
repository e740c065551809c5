"""The command that removes attentions and activations together."""

from __future__ import annotations

from typing import Annotated

from lyapunov_prune.cli import choices
from lyapunov_prune.cli.inputs import draw_report, load_inputs
from lyapunov_prune.cli.jobs import first_goes_on, jobs_folder
from lyapunov_prune.cli.options import (
    ABOVE_ZERO,
    Device,
    Inputs,
    Model,
    Target,
    TextOptions,
    counted,
    one_of,
    what_option,
)
from lyapunov_prune.cli.terminal import say, show
from lyapunov_prune.merging.table import DEFAULT, REDUCTIONS

STEPS, LAST_STEPS = 12, 100  # of each point of the map, and of the chosen pair (experiments/5_joint)
_RANK = 8


def joint(
    model: Model,
    *,
    remove: Annotated[float, ABOVE_ZERO, what_option(help="Number or share of attentions and activations.", **counted)],
    reduction: Annotated[
        choices.Reduction, what_option(**one_of(REDUCTIONS, "What replaces an activation."))
    ] = DEFAULT,
    device: Device = "auto",
    text: TextOptions = TextOptions(tokens=40960, context=256),
    output: Target,
) -> None:
    """Remove attentions and activations, so many of each as a map of the score after recovery says.

    Writes a compact checkpoint, with joint.json, plan.json and a report. If it is interrupted, the same command
    continues.
    """
    inputs = Inputs(device=device, dtype="float32", **vars(text))
    inputs.require_loaded("joint", one_place=True)

    from lyapunov_prune.data.examples import slices
    from lyapunov_prune.joint.recovery import RecoveryRecipe
    from lyapunov_prune.joint.run import remove_jointly
    from lyapunov_prune.ranking.counts import count_of
    from lyapunov_prune.results.files import require_empty

    require_empty(output)
    folder = jobs_folder()
    first_goes_on()
    dense, batch = load_inputs(model, inputs)
    done = remove_jointly(
        dense,
        dense.tokenizer,
        slices(batch),
        output,
        remove=count_of(remove, 2 * dense.structure.num_layers),
        reduction=reduction,
        steps=STEPS,
        recover_steps=LAST_STEPS,
        recipe=RecoveryRecipe(rank=_RANK),
        folder=folder,
    )
    draw_report(output)
    show(done, output, kept=output / "joint.json")
    say(f"Report: {output / 'report.html'}")
