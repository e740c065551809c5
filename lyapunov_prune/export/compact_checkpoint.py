"""A compact model as a folder that loads with this package and without it, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.checkpoints.cards import write_card
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_gate import verify_compact
from lyapunov_prune.models.decoder import Decoder, takes_model
from lyapunov_prune.models.plain import PlainAny
from lyapunov_prune.models.structure import model_name
from lyapunov_prune.pruning.gate import GateReport
from lyapunov_prune.pruning.provenance import gate_table, require_passed, save
from lyapunov_prune.results.files import require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_of

GATE = "gate.json"


@takes_model
def write_compact(
    model: PlainAny,
    tokenizer: PreTrainedTokenizerBase | None,
    cuts: Cuts,
    target: str | Path,
    batch: TokenBatch | ImageBatch | None = None,
) -> GateReport:
    """Cut `cuts` out of `model`, pass the gate on the saved files, and write the folder `target`.

    For cuts that no plan tells, such as matrices that were trained; `write_pruned` writes a plan. The folder holds the
    weights, their module, the tokenizer if there is one, a model card (README.md), `gate.json` and `history.json`.
    Raises CheckFailed when the gate fails and LyapunovPruneError for cuts that are not possible, when the target is not
    empty or the disk refuses; either way nothing is left at `target`.
    """
    require_empty(target)
    compact = make_compact(model, cuts)
    with whole_folder(target) as folder:
        gate = save_compact(folder, model, compact, tokenizer, cuts, batch)
        gate.save(folder / GATE)
        _describe(folder, model, compact, cuts, gate)
        return gate


def save_compact(
    folder: Path,
    decoder: Decoder,
    compact: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    cuts: Cuts,
    batch: TokenBatch | ImageBatch | None,
) -> GateReport:
    """Save `compact`, made of `decoder` by `cuts`, and its history in `folder`, once it has passed the gate there.

    Raises CheckFailed when the gate fails: `folder` must be one that goes then (`whole_folder`).
    """
    save(compact, tokenizer, folder)
    gate = verify_compact(decoder, compact, cuts, batch, checkpoint=folder)
    require_passed(gate)
    history_of(compact).save(folder / HISTORY)
    return gate


def _describe(folder: Path, decoder: Decoder, compact: PreTrainedModel, cuts: Cuts, gate: GateReport) -> None:
    model, layers = decoder.model, decoder.structure.num_layers
    name = model_name(model)
    gone = []
    if cuts.attention:
        gone.append(f"The attention of layers {', '.join(map(str, sorted(cuts.attention)))}, counted from 0.")
    if cuts.merged:
        merged = ", ".join(map(str, sorted(cuts.merged)))
        gone.append(f"The feed-forward blocks of layers {merged}, for each of which one matrix stands.")
    gone.append("The list `cuts` in config.json says it layer by layer.")
    write_card(
        folder,
        f"{Path(name).name}, compact",
        f"{layers} layers, {len(cuts.attention)} of which lost their attention and {len(cuts.merged)} of which had "
        f"their feed-forward block\nmerged into one matrix. {compact.num_parameters():,} parameters of "
        f"{model.num_parameters():,} are left.",
        compact,
        {"Removed": "\n".join(gone), "Gate": gate_table(gate)},
        tags=("depth-pruning",),
    )
