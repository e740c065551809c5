"""The DeciLM format: a compact checkpoint that lacks attentions alone, as vLLM and llama.cpp know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.export.formats.compact import COMPACT, Compact
from lyapunov_prune.pruning.stored import Stored

if TYPE_CHECKING:
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.surgery import Operation


class Deci(Compact):
    """A compact checkpoint of a Llama or Mistral whose config.json also has the `block_configs` of DeciLM."""

    help = "compact and DeciLM, which engines load (removed attentions only)"
    reference = "DeciLM, `nemotron_nas.py` in vLLM"
    readers = "vLLM with `trust_remote_code`, llama.cpp once it is a .gguf file, and who reads compact"
    card = Stored("deci", COMPACT.parts, "The list `block_configs` in config.json says it.", engines=True)

    def require_plan(self, decoder: Decoder, plan: PruningPlan) -> None:
        from lyapunov_prune.export.compact import require_deci

        super().require_plan(decoder, plan)
        require_deci(decoder, plan)

    def cut(self, decoder: Decoder, operation: Operation) -> Decoder:
        from lyapunov_prune.models.compact import BLOCKS

        made = super().cut(decoder, operation)
        setattr(made.model.config, BLOCKS, [])  # filled when it is saved
        return made
