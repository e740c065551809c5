"""The compact format: parts that a plan removes take no space, and low-rank matrices are stored as two factors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from lyapunov_prune.export.format import Finished, Format, Removed
from lyapunov_prune.pruning.stored import Stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.compression.recipe import Asked
    from lyapunov_prune.compression.report import CompressionReport
    from lyapunov_prune.export.exported import Exported
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.gate import GateReport
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.surgery import Operation

COMPACT: Final = Stored(
    "compact",
    {
        "attention": "It is gone, with the norms that serve it alone.",
        "activation": "The block is one linear map, and\nits matrix takes the place of the others.",
    },
    note="The list `cuts` in config.json says it layer by layer.",
)


class Compact(Format):
    """A class of its own (`models.modeling_compact`), whose config says layer by layer what is gone or factored."""

    help = "removed parts are absent, and low ranks are stored as two factors"
    reference = "this package, `models/modeling_compact.py`"
    readers = "this package, and transformers by the module beside the weights"
    units: ClassVar[tuple[str, ...]] = ("rank",)
    card: ClassVar[Stored] = COMPACT
    streamed: ClassVar[tuple[str, ...]] = ("compress",)
    exports = True

    def require_plan(self, decoder: Decoder, plan: PruningPlan) -> None:
        from lyapunov_prune.export.compact import require_compact

        require_compact(decoder, plan)

    def cut(self, decoder: Decoder, operation: Operation) -> Decoder:
        from lyapunov_prune.export.compact import Cuts, make_compact
        from lyapunov_prune.models.decoder import wrap_any

        return wrap_any(make_compact(decoder, Cuts.of(operation.plan, operation.merged), shared=True))

    def save(self, folder: Path, made: Removed) -> GateReport:
        from lyapunov_prune.export.compact import Cuts
        from lyapunov_prune.export.compact_gate import save_compact

        cuts = Cuts.of(made.operation.plan, made.operation.merged)
        return save_compact(folder, made.decoder, made.pruned.model, made.tokenizer, cuts, made.batch)

    def require_model(self, model: PreTrainedModel, asked: Asked) -> None:
        from lyapunov_prune.export.factors import require_smaller

        require_smaller(model, asked.rank)

    def write(self, target: Path, made: Finished) -> CompressionReport:
        from lyapunov_prune.export.factored import write_factored

        return write_factored(made.done, made.tokenizer, target, made.title, made.results)

    def export(self, decoder: Decoder, target: Path) -> Exported:
        from lyapunov_prune.export.compact_gate import export_compact

        return export_compact(decoder, decoder.tokenizer, target, self.name)
