"""A pruned model as a plain transformers checkpoint, with its card and provenance, whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.checkpoints.cards import as_text, write_card
from lyapunov_prune.checkpoints.reloading import RELOADED
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import CheckFailed
from lyapunov_prune.forward.hooks import require_finite
from lyapunov_prune.models.kinds import LayerKinds, find_kinds
from lyapunov_prune.models.loading import quiet
from lyapunov_prune.models.structure import Structure, find_structure
from lyapunov_prune.models.wrappers import loading_class
from lyapunov_prune.pruning.gate import GateReport, crashed, verify_removal
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.surgery import cut
from lyapunov_prune.results.files import require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_of
from lyapunov_prune.results.result import Result, versions

PROVENANCE = "provenance.json"


@dataclass(frozen=True)
class Provenance(Result):
    """Where a pruned checkpoint came from: plan, scores, what they were measured on, and the gate.

    `kept_to_original[i]` is the index in the original model of layer `i` of the pruned one. `not_run` names
    checks of the gate that were not made: logits need the model in memory.
    """

    source: str
    kept_to_original: tuple[int, ...]
    plan: PruningPlan
    gate: GateReport
    versions: dict[str, str]
    not_run: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"layer": range(len(self.kept_to_original)), "original": self.kept_to_original})

    def headline(self) -> str:
        return self.plan.headline()


def write_pruned(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: PruningPlan,
    target: str | Path,
    batch: TokenBatch | None = None,
) -> Provenance:
    """Cut the layers of `plan` out, pass the gate on the saved files, and write the folder `target`.

    The folder loads with `AutoModelForCausalLM.from_pretrained` (a decoder inside a multimodal model: with the
    class of that, whose processor is not written) and holds the tokenizer, a model card
    (README.md), `provenance.json` and `history.json`. Raises CheckFailed when the gate fails and LyapunovPruneError
    when the target is not empty or the disk refuses; either way nothing is left at `target`.
    """
    require_empty(target)
    structure = find_structure(model)
    if batch is not None:
        require_finite(structure, batch.ids[:1], batch.text)  # else the gate would blame the removal
    pruned = cut(model, plan)
    with whole_folder(target) as folder:
        with quiet():
            save(pruned, folder)
            tokenizer.save_pretrained(folder)
        gate = verify_removal(model, pruned, plan, batch, checkpoint=folder)
        if not gate.passed:
            raise refused(gate.failure())
        history_of(pruned).save(folder / HISTORY)
        loader = loading_class(pruned).__name__
        return describe(folder, plan, gate, structure, pruned.num_parameters(), loader=loader)


def save(pruned: PreTrainedModel, folder: Path) -> None:
    """`save_pretrained`; a model that it cannot save fails the gate."""
    try:
        pruned.save_pretrained(folder)
    except (OSError, SafetensorError):
        raise  # the disk
    except Exception as error:
        check = crashed(RELOADED, error)
        raise refused(f"{check.name}: {check.detail}") from error


def refused(failure: str) -> CheckFailed:
    return CheckFailed(f"nothing written: the pruned model fails the gate, {failure}; remove other layers")


def describe(
    folder: Path,
    plan: PruningPlan,
    gate: GateReport,
    structure: Structure,
    parameters: int,
    not_run: tuple[str, ...] = (),
    loader: str = "AutoModelForCausalLM",
) -> Provenance:
    """Write provenance.json and the model card beside the weights in `folder`.

    `structure` is the original's, `parameters` the number that is left, `loader` the class that loads it.
    """
    provenance = Provenance(
        source=plan.model.name,
        kept_to_original=plan.kept,
        plan=plan,
        gate=gate,
        versions=versions(),
        not_run=not_run,
    )
    provenance.save(folder / PROVENANCE)
    write_card(
        folder,
        f"{Path(plan.model.name).name} with {len(plan.kept)} of {plan.model.num_layers} layers",
        f"{as_text(plan.headline())}. {parameters:,} parameters of {plan.model.parameters:,} are left. "
        "The model has not been\ntrained after the removal.",
        loader,
        {
            "Removed": _removed(plan),
            "Engines": _engines(find_kinds(structure), plan.kept),
            "Gate": _checked(provenance),
        },
        tags=("depth-pruning",),
        source=plan.model.name,
    )
    return provenance


def _removed(plan: PruningPlan) -> str:
    """What is gone, and by which measurements."""
    lines = []
    if plan.remove:
        lines.append(f"Layers of the original, counted from 0: {', '.join(map(str, plan.remove))}.")
    for part, layers in (("Attention", plan.drop_attention), ("MLP", plan.drop_mlp)):
        if layers:
            lines.append(
                f"{part} of layers of the original: {', '.join(map(str, layers))}. The output projection is zero,\n"
                "which computes the same as leaving the branch out. In this plain checkpoint it saves no time or\n"
                "memory; only removing whole layers does."
            )
    lines.append(f"Layer *i* of this model is layer `kept_to_original[i]` of the original (`{PROVENANCE}`).")
    texts = [as_text(m.line()) for m in plan.measured_on] or ["nothing: the layers were given by hand"]
    lines += ["", "The scores were measured on:", "", *(f"- {text}" for text in texts)]
    return "\n".join(lines)


def _checked(provenance: Provenance) -> str:
    """The table of the gate."""
    how = "in floating point, on some tokens"
    if provenance.not_run:
        how = "on the files alone: the layers were removed on disk, and no logits of this model have been computed"
    return gate_table(provenance.gate, how, provenance.not_run)


def gate_table(gate: GateReport, how: str = "in floating point, on some tokens", not_run: tuple[str, ...] = ()) -> str:
    """What a card says of the gate."""
    rows = ["| check | result | measured | limit |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {as_text(c.name)} | {'passed' if c.passed else 'failed'} | {c.measured:.3g} | {c.limit:.3g} |"
        for c in gate.checks
    ]
    rows += [f"| {name} | not run | | |" for name in not_run]
    return "\n".join([f"Checked when this folder was written, {how}:", "", *rows])


def _engines(kinds: LayerKinds, kept: tuple[int, ...]) -> str:
    """Who may stumble over the layers that are left, in plain words."""
    if kinds.survives(kept):
        return (
            "Every layer is of the kind that the layer of its number has in the original, so an engine that runs the\n"
            "original should need nothing but the number of layers, which config.json gives."
        )
    repeated = f"repeat every {kinds.period} layers" if kinds.period else "follow a pattern"
    return (
        f"The layers of the original are of {len(set(kinds.kinds))} kinds, which {repeated}; those of this model\n"
        "do not any more. `transformers` reads the kind of every layer from config.json and loads it. Serving\n"
        "engines and converters that work out the kind from the layer's number instead may refuse this model or,\n"
        "worse, run layers as the wrong kind: compare a few outputs with those of `transformers` before use."
    )
