"""The compact format: parts that a plan removes take no space."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from lyapunov_prune.export.format import CutModel, Format
from lyapunov_prune.pruning.stored import FormatNotes

if TYPE_CHECKING:
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.gate import GateReport
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.surgery import Operation

COMPACT: Final = FormatNotes(
    "compact",
    {
        "attention": "It is gone, with the norms that serve it alone.",
        "activation": "The block is one linear map, and\nits matrix takes the place of the others.",
    },
    note="The list `cuts` in config.json says it layer by layer.",
)


class Compact(Format):
    """A class of its own (`models.modeling_compact`), whose config says layer by layer what is gone."""

    help = "removed parts are absent"
    reference = "this package, `models/modeling_compact.py`"
    readers = "this package, and transformers by the module beside the weights"
    card: ClassVar[FormatNotes] = COMPACT

    def require_plan(self, decoder: Decoder, plan: PruningPlan) -> None:
        from lyapunov_prune.export.compact import require_compact

        require_compact(decoder, plan)

    def cut(self, decoder: Decoder, operation: Operation) -> Decoder:
        from lyapunov_prune.export.compact import Cuts, make_compact
        from lyapunov_prune.models.decoder import wrap_any

        return wrap_any(make_compact(decoder, Cuts.of(operation.plan, operation.merged), shared=True))

    def save(self, folder: Path, made: CutModel) -> GateReport:
        from lyapunov_prune.export.compact import Cuts
        from lyapunov_prune.export.compact_gate import save_compact

        cuts = Cuts.of(made.operation.plan, made.operation.merged)
        return save_compact(folder, made.decoder, made.pruned.model, made.tokenizer, cuts, made.batch)
