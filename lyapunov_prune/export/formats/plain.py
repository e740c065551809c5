"""The plain format: a checkpoint of the original's own class, every tensor at its full size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.format import CutModel, Format
from lyapunov_prune.pruning.stored import PLAIN

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lyapunov_prune.compression.compress import Compressed
    from lyapunov_prune.compression.report import CompressionReport
    from lyapunov_prune.export.exported import Exported
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.gate import GateReport
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.surgery import Operation


class Plain(Format):
    """Whole layers, channels and experts are gone. Compressed matrices are stored dense."""

    help = "dense matrices"
    reference = "transformers"
    readers = "transformers, and engines that run the original"
    units: ClassVar[tuple[str, ...]] = ("sparsity", "rank", "bits")
    card = PLAIN
    streamed: ClassVar[tuple[str, ...]] = ("prune", "compress")
    mends = True
    exports = True

    def require_plan(self, decoder: Decoder, plan: PruningPlan) -> None:
        from lyapunov_prune.models.pictures import looks_at_images

        if looks_at_images(decoder.model):
            raise LyapunovPruneError(
                f"{type(decoder.model).__name__} is an image classifier, which only format compact supports; give "
                "that format"
            )
        plan.require_plain()

    def cut(self, decoder: Decoder, operation: Operation) -> Decoder:
        from lyapunov_prune.pruning.surgery import cut

        return cut(decoder, operation, shared=True)

    def save(self, folder: Path, made: CutModel) -> GateReport:
        from lyapunov_prune.data.images import ImageBatch
        from lyapunov_prune.pruning.provenance import save
        from lyapunov_prune.pruning.removal import check_removal

        assert not isinstance(made.batch, ImageBatch)  # `require_plan`
        remedy = made.operation.plan.gone.remedy
        save(made.pruned.model, made.tokenizer, folder, remedy)
        gate = check_removal(made.decoder, made.pruned, made.operation, made.batch, folder)
        gate.require_passed(remedy=remedy)
        return gate

    def write(
        self,
        target: Path,
        done: Compressed,
        tokenizer: PreTrainedTokenizerBase,
        title: str,
        dense: PreTrainedModel | None = None,
    ) -> CompressionReport:
        from lyapunov_prune.checkpoints.saving import write_model
        from lyapunov_prune.compression.report import REPORT

        write_model(done.model, tokenizer, target, {REPORT: done.report}, title, done.report.about())
        return done.report

    def export(self, decoder: Decoder, target: Path) -> Exported:
        from lyapunov_prune.checkpoints.saving import save
        from lyapunov_prune.export.exported import exported
        from lyapunov_prune.results.history import one_more_step

        with one_more_step(decoder.model, "export"):
            check = save(decoder, decoder.tokenizer, target)
        return exported(self.name, decoder.model, decoder.model.state_dict().values(), (check,))
