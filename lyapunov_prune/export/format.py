"""The base class of formats: which results a format can hold, and how it writes them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.pruning.stored import FormatNotes
from lyapunov_prune.registry import Choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lyapunov_prune.compression.compress import Compressed
    from lyapunov_prune.compression.recipe import CompressionRequest
    from lyapunov_prune.compression.report import CompressionReport
    from lyapunov_prune.data.examples import Examples
    from lyapunov_prune.export.exported import Exported
    from lyapunov_prune.mending.report import MendReport
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.alone import RoundedAlone
    from lyapunov_prune.pruning.gate import GateReport
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.provenance import Provenance
    from lyapunov_prune.pruning.surgery import Operation


# The types that llama.cpp runs and writes without an importance matrix.
Quantisation = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "q3_k", "q2_k", "iq4_nl",
    "iq4_xs", "iq3_s", "iq3_xxs", "mxfp4",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class CutModel:
    """A model from which `operation` was carried out (`Format.cut`), with the original and the batch of its gate."""

    decoder: Decoder
    pruned: Decoder
    tokenizer: PreTrainedTokenizerBase | None
    operation: Operation
    batch: Examples | None
    mended: MendReport | None
    alone: RoundedAlone | None


class Format(Choice):
    """A way to write a checkpoint. Each format is a subclass in a file of its own and a row in `table.FORMATS`.

    `readers` names the programs that load it. `units` are the units of the compression methods whose results it can
    hold. `card` is its sentence in the model card of a plan; None if `prune` does not write it. `streamed` names the
    commands that write it without the model in memory. `mends` says whether it can hold mended layers; `keeps_dense`,
    whether `write` also needs the model before compression; `exports`, whether `export` writes it; `loads`, whether
    this package loads what `export` wrote.
    """

    readers: ClassVar[str]
    units: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[FormatNotes | None] = None
    streamed: ClassVar[tuple[str, ...]] = ()
    mends: ClassVar[bool] = False
    symmetric: ClassVar[bool] = False  # rounding must use symmetric grids: zero points do not load packed
    keeps_dense: ClassVar[bool] = False
    exports: ClassVar[bool] = False
    loads: ClassVar[bool] = True

    def require_target(self, target: Path) -> None:
        """Raise LyapunovPruneError unless the format can be written to `target`."""
        from lyapunov_prune.results.files import require_empty

        require_empty(target)

    def require_names(self, source: str, target: Path) -> None:
        """Raise LyapunovPruneError unless what the model `source` is pruned to can be written to `target`."""
        self.require_target(target)

    def require_plan(self, decoder: Decoder, plan: PruningPlan) -> None:
        """Raise LyapunovPruneError for a plan that the format cannot hold, before anything is fitted."""

    def cut(self, decoder: Decoder, operation: Operation) -> Decoder:
        """A new model without what `operation` takes out, in the memory of the original."""
        raise NotImplementedError

    def save(self, folder: Path, made: CutModel) -> GateReport:
        """Save what `cut` made in `folder`.

        Raises CheckFailed if the saved model fails the gate. The caller must then delete `folder`, as `whole_folder`
        does.
        """
        raise NotImplementedError

    def write_cut(self, target: Path, made: CutModel) -> Provenance:
        """Write the files of `save`, what `provenance.describe` adds, to the folder `target`, whole or not at all.

        Raises CheckFailed if the saved model fails the gate, and LyapunovPruneError if writing fails.
        """
        from lyapunov_prune.pruning.provenance import describe
        from lyapunov_prune.results.files import whole_folder

        assert self.card is not None
        with whole_folder(target) as folder:
            gate, plan, structure = self.save(folder, made), made.operation.plan, made.decoder.structure
            told: dict[str, Any] = {"stored": self.card, "mended": made.mended, "alone": made.alone}
            return describe(folder, plan, gate, structure, made.pruned.model, **told)

    def require_method(self, asked: CompressionRequest) -> None:
        """Raise LyapunovPruneError for a compression whose result the format cannot hold, before a model is loaded."""
        from lyapunov_prune.compression.table import METHODS

        if METHODS[asked.method].unit not in self.units:
            others = ", ".join(name for name, known in METHODS.items() if known.unit in self.units)
            remedy = (
                f"give --method {others}"
                if others
                else "write a folder and export that, or give shrink --size for a .gguf file of few bits"
            )
            raise LyapunovPruneError(f"the format {self.name} cannot store the result of {asked.method}; {remedy}")

    def require_model(self, model: PreTrainedModel, asked: CompressionRequest) -> None:
        """Raise LyapunovPruneError for a model whose matrices the format cannot hold, before anything is measured."""

    def write(
        self,
        target: Path,
        done: Compressed,
        tokenizer: PreTrainedTokenizerBase,
        title: str,
        dense: PreTrainedModel | None = None,
    ) -> CompressionReport:
        """Write the compressed model and its card, called `title`, to `target`; returns the report of what was stored.

        `dense` is the model before compression, for a format that `keeps_dense`.
        Raises CheckFailed if the files would load as another model, and LyapunovPruneError if the target is not empty
        or writing fails. In both cases nothing is left there.
        """
        raise NotImplementedError

    def export(self, decoder: Decoder, target: Path) -> Exported:
        """Write the model of `decoder`, as it is, and its tokenizer to `target`, whole or not at all.

        Raises LyapunovPruneError for a model that the format cannot hold, and CheckFailed when what was written is
        another model.
        """
        raise NotImplementedError
