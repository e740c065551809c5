"""The model card of a joint removal: how many parts of each type were removed and why, the score, the command."""

from __future__ import annotations

import shlex

from lyapunov_prune.checkpoints.cards import as_text
from lyapunov_prune.errors import printable
from lyapunov_prune.joint.result import REPORT, JointRun


def since(run: JointRun) -> str:
    """A sentence on the training after the removal."""
    steps = sum(run.start) * run.points.steps + len(run.losses)
    return (
        f"Without the removed\nparts it was trained for {steps} steps to predict what the dense model predicts, "
        "and then merged."
    )


def sections(run: JointRun) -> dict[str, str]:
    """Heading and Markdown of each section between the list of removed parts and the gate."""
    decision = run.decision
    attention, activation = decision.chosen
    budget = f"{decision.remove} to remove" if decision.remove else f"a forward {decision.speedup:g} times as fast"
    standing = (
        "The choice is certain as long as the noise is below its bound (`argmax_of_noise_lt_half_gap`)."
        if decision.certain
        else f"The choice is not certain: {int(decision.within.sum()) - 1} other pairs are within twice the noise, and "
        f"it can cost up to\n{decision.regret:.3g} (`regret_of_argmax_le`)."
    )
    what = "Top-1 accuracy" if run.measured_on.images else "Minus the loss in nats per token"
    pairs = "pair that meets it" if len(decision.pairs) == 1 else "pairs that meet it"
    lead = f"It leads the next by {decision.gap:.3g}. " if len(decision.pairs) > 1 else ""
    return {
        "Decision": f"""The budget is {budget}. Of {len(decision.pairs)} {pairs}, this is the one with the largest
predicted score after recovery: {attention} attentions and {activation} activations are removed.
{lead}The noise is at most {decision.noise:.3g}; the standard error
of a difference on the selection data is {decision.selection_error:.3g}.
{standing}
`{REPORT}` holds the points and the map behind this decision.""",
        "Score": f"""{what} on data that was not used above: {run.chosen:.4g}, dense {run.dense:.4g}.
The standard error of the difference, paired by item, is {run.error:.2g}. Measured on:

- {as_text(run.measured_on.line())}""",
        "Command": f"""On the data named above, with {_settings(run)}, and defaults for all options that are left out:

    {_command(run)}""",
    }


def _settings(run: JointRun) -> str:
    """The settings that only `remove_jointly` in Python takes."""
    points = run.points
    rank = "all weights trained" if points.recipe.rank is None else f"updates of rank {points.recipe.rank}"
    return (
        f"importance {run.importance.method}, {rank}, {points.steps} steps a point and {len(run.losses)} of the chosen "
        f"pair, {len(set(points.seeds.tolist()))} seeds a point from {points.seeds[0]} on"
    )


def _command(run: JointRun) -> str:
    """The command, as far as the results record it."""
    decision = run.decision
    budget = ["--remove", f"{decision.remove}"] if decision.remove else ["--speedup", f"{decision.speedup:g}"]
    options = ["--reduction", run.importance.reduction]
    return printable(shlex.join(["lyapunov-prune", "joint", run.plan.model.name, *budget, *options, "-o", "OUT"]))
