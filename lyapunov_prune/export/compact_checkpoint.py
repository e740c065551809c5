"""Write a compact model as a folder that loads with and without this package. It is written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.checkpoints.cards import write_card
from lyapunov_prune.checkpoints.saving import write_model
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import Cuts, make_compact, require_served
from lyapunov_prune.export.compact_gate import verify_compact
from lyapunov_prune.export.exported import Exported, exported
from lyapunov_prune.forward.sublayers import find_sublayers, named_branches
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.deci import BLOCKS
from lyapunov_prune.models.decoder import Decoder, takes_model
from lyapunov_prune.models.plain import PlainAny
from lyapunov_prune.models.structure import in_eval_mode, model_name
from lyapunov_prune.pruning.gate import GateReport
from lyapunov_prune.pruning.provenance import gate_table, save
from lyapunov_prune.results.files import require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_of, one_more_step

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

    Use it for cuts that no plan describes, for example trained matrices; `write_pruned` carries out a plan. The folder
    holds the weights, their module, the tokenizer if there is one, a model card (README.md), `gate.json` and
    `history.json`. Raises CheckFailed if the gate fails, and LyapunovPruneError if the cuts are impossible, the target
    is not empty or writing fails. In both cases nothing is left at `target`.
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
    """Save `compact`, made from `decoder` by `cuts`, with its history in `folder`, then put it through the gate there.

    Raises CheckFailed if the gate fails. The caller must then delete `folder`, as `whole_folder` does.
    """
    save(compact, tokenizer, folder)
    gate = verify_compact(decoder, compact, cuts, batch, checkpoint=folder)
    gate.require_passed()
    history_of(compact).save(folder / HISTORY)
    return gate


@takes_model
def export_compact(
    model: PlainAny, tokenizer: PreTrainedTokenizerBase | None, target: str | Path, format: str
) -> Exported:
    """Write a compact model, or a plain one without its attentions that are zero, to the folder `target`.

    `format` is compact or deci. Raises CheckFailed if the gate fails. Raises LyapunovPruneError if nothing of the model
    is gone or zero, if `format` cannot hold it, or if `target` is not empty.
    """
    require_empty(target)
    plain, cuts, compact = not is_compact(model.model), Cuts(), model.model
    if plain:
        cuts = Cuts(attention=_silent_attentions(model))
        compact = make_compact(model, cuts, shared=True)
    if format == "deci":
        require_served(compact, compact.config.cuts)
    with _blocks_told(compact, format == "deci"), one_more_step(compact, "export"):
        if plain:
            with whole_folder(target) as folder:
                gate = save_compact(folder, model, compact, tokenizer, cuts, None)
                _describe(folder, model, compact, cuts, gate)
            return exported(format, compact, gate.checks)
        name = Path(model_name(compact)).name
        check = write_model(compact, tokenizer, target, {}, f"{name}, as {format}", "Written as it was.")
        return exported(format, compact, (check,))


@in_eval_mode
def _silent_attentions(decoder: Decoder) -> tuple[int, ...]:
    """The layers whose attention adds nothing to the state, as `prune --what attention` leaves it in a plain model."""
    layers = tuple(range(decoder.structure.num_layers))
    branches = named_branches(find_sublayers(decoder, layers), layers, ())
    found = tuple(i for i, _, branch in branches if not branch(branch.x).any())
    if not found:
        raise LyapunovPruneError("no attention is absent; give --format plain")
    return found


@contextmanager
def _blocks_told(model: PreTrainedModel, told: bool) -> Iterator[None]:
    """Within the block, `model` is saved as DeciLM if `told`, else as compact alone."""
    before = vars(model.config).pop(BLOCKS, None)
    if told:
        setattr(model.config, BLOCKS, [])  # filled when it is saved
    try:
        yield
    finally:
        vars(model.config).pop(BLOCKS, None)
        if before is not None:
            setattr(model.config, BLOCKS, before)


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
