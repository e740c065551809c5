"""The GGUF format: the file that the model was read from, without the layers that went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lyapunov_prune.export.format import CutModel, Quantisation
from lyapunov_prune.export.formats.plain import Plain
from lyapunov_prune.pruning.stored import FormatNotes

if TYPE_CHECKING:
    from lyapunov_prune.export.exported import Exported
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.provenance import Provenance


class GGUF(Plain):
    """In a pruned .gguf file, unchanged tensors keep the original's bytes, whatever their quantisation; mended ones are
    rounded anew. `quantize` is the type that the matrices of an exported model are rounded to, float16 by default."""

    help = "a .gguf file; kept tensors of a pruned one are copied byte for byte"
    reference = "GGUF, llama.cpp"
    readers = "llama.cpp and what is built on it, this package"
    units: ClassVar[tuple[str, ...]] = ()
    card = FormatNotes("gguf", {}, engines=True)
    streamed: ClassVar[tuple[str, ...]] = ("prune",)
    quantize: Quantisation | None = None

    def require_target(self, target: Path) -> None:
        from lyapunov_prune.export.gguf_original import require_file

        require_file(target)

    def require_names(self, source: str, target: Path) -> None:
        from lyapunov_prune.models.gguf import source_file

        source_file(source)
        self.require_target(target)

    def require_plan(self, decoder: Decoder, plan: PruningPlan) -> None:
        from lyapunov_prune.export.gguf_original import require_gguf

        require_gguf(decoder.model.config._name_or_path, plan)

    def write_cut(self, target: Path, made: CutModel) -> Provenance:
        from lyapunov_prune.data.images import ImageBatch
        from lyapunov_prune.export.gguf import save_gguf

        assert not isinstance(made.batch, ImageBatch)  # image classifiers do not come as GGUF files
        return save_gguf(target, made.decoder, made.pruned, made.operation, made.batch, made.mended, made.alone)

    def export(self, decoder: Decoder, target: Path) -> Exported:
        from lyapunov_prune.export.gguf_whole import write_gguf

        return write_gguf(decoder, decoder.tokenizer, target, self.quantize or "f16")
