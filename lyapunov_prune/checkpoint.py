"""A pruned model as a plain transformers checkpoint, with its card and provenance, whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.errors import CheckFailed
from lyapunov_prune.files import require_empty, whole_folder
from lyapunov_prune.gate import GateReport, verify_removal
from lyapunov_prune.models.loading import quiet
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.plan import PruningPlan
from lyapunov_prune.results import Result, versions
from lyapunov_prune.surgery import remove_layers
from lyapunov_prune.text import TokenBatch
from lyapunov_prune.tracing import require_finite

PROVENANCE = "provenance.json"


@dataclass(frozen=True)
class Provenance(Result):
    """Where a pruned checkpoint came from: plan, scores, what they were measured on, and the gate.

    `kept_to_original[i]` is the index in the original model of layer `i` of the pruned one.
    """

    source: str
    kept_to_original: tuple[int, ...]
    plan: PruningPlan
    gate: GateReport
    versions: dict[str, str]

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
    """Remove the layers of `plan`, pass the gate on the saved files, and write the folder `target`.

    The folder loads with `AutoModelForCausalLM.from_pretrained` and holds the tokenizer, a model card
    (README.md) and `provenance.json`. Raises CheckFailed when the gate fails and LyapunovPruneError when
    the target is not empty or the disk refuses; either way nothing is left at `target`.
    """
    require_empty(target)
    if batch is not None:
        require_finite(find_structure(model), batch.ids[:1], batch.text)  # else the gate would blame the removal
    pruned = remove_layers(model, plan)
    with whole_folder(target) as folder:
        with quiet():
            pruned.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        gate = verify_removal(model, pruned, plan, batch, checkpoint=folder)
        if not gate.passed:
            raise CheckFailed(
                f"nothing written: the pruned model fails the gate, {gate.failure()}; remove other layers"
            )
        provenance = Provenance(
            source=plan.model.name, kept_to_original=plan.kept, plan=plan, gate=gate, versions=versions()
        )
        provenance.save(folder / PROVENANCE)
        (folder / "README.md").write_text(_card(provenance, pruned.num_parameters()), encoding="utf-8")
    return provenance


def _removed(plan: PruningPlan) -> str:
    """What is gone, in words for the card."""
    lines = []
    if plan.remove:
        lines.append(f"Layers of the original, counted from 0: {', '.join(map(str, plan.remove))}.")
    for part, layers in (("Attention", plan.drop_attention), ("MLP", plan.drop_mlp)):
        if layers:
            lines.append(
                f"{part} of layers of the original: {', '.join(map(str, layers))}. The output projection is zero,\n"
                "which computes the same as leaving the branch out. It saves no time or memory; only removing whole\n"
                "layers does."
            )
    return "\n".join(lines)


def _card(provenance: Provenance, parameters: int) -> str:
    plan, layers = provenance.plan, provenance.plan.model.num_layers
    measured = "\n".join(f"- {m.line()}" for m in plan.measured_on) or "- nothing: the layers were given by hand"
    checks = "\n".join(
        f"| {c.name} | {'passed' if c.passed else 'failed'} | {c.measured:.3g} | {c.limit:.3g} |"
        for c in provenance.gate.checks
    )
    # A hub id makes a link on the hub; a local path would make the card invalid there.
    is_hub = provenance.source.count("/") == 1 and not Path(provenance.source).exists()
    base = f"base_model: {provenance.source}\n" if is_hub else ""
    return f"""---
library_name: transformers
{base}tags:
- lyapunov-prune
- depth-pruning
---
# {Path(provenance.source).name} with {len(plan.kept)} of {layers} layers

{plan.headline()}. {parameters:,} parameters of {plan.model.parameters:,} are left. The model has not been
trained after the removal.

## Load

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

No custom code is needed.

## Removed

{_removed(plan)}
Layer *i* of this model is layer `kept_to_original[i]` of the original (`{PROVENANCE}`).

The scores were measured on:

{measured}

## Gate

Checked when this folder was written, in floating point, on some tokens:

| check | result | measured | limit |
| --- | --- | --- | --- |
{checks}

Licence and intended use are those of the original model.
"""
