"""The bits of every layer in the form of other quantisers: a recipe for llm-compressor, overrides for llama.cpp."""

from __future__ import annotations

from typing import Any

import yaml
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.allocation.bit_widths import DENSE
from lyapunov_prune.checkpoints.beside import RECIPES
from lyapunov_prune.compression.report import CompressionReport
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.progress import warn

LLM_COMPRESSOR, LLAMA_CPP = RECIPES
# The llama.cpp type for a number of bits per weight, not counting its scales.
_TYPES = {2: "q2_k", 3: "q3_k", 4: "q4_k", 5: "q5_k", 6: "q6_k", 7: "q8_0", 8: "q8_0", DENSE: "f16"}


def recipes_of(model: PreTrainedModel, report: CompressionReport) -> dict[str, str]:
    """The content of both files by name; a line on stderr says why one that cannot be written is left out."""
    found = {}
    for name, write in (
        (LLM_COMPRESSOR, lambda: llm_compressor_recipe(model, report)),
        (LLAMA_CPP, lambda: llama_cpp_overrides(report)),
    ):
        try:
            found[name] = write()
        except LyapunovPruneError as error:
            warn(f"{name} is not written: {error.message}")
    return found


def llm_compressor_recipe(model: PreTrainedModel, report: CompressionReport) -> str:
    """The YAML recipe by which llm-compressor rounds the matrices of `model` as `report` says, one group a width.

    It uses GPTQModifier for gptq, AWQModifier for awq and QuantizationModifier otherwise, on symmetric grids; `ignore`
    lists the Linear modules that stay dense. Raises LyapunovPruneError for amounts other than whole bits, and for
    matrices that are not a Linear of their own.
    """
    groups: dict[int, dict[str, None]] = {}
    for p in find_projections(wrap(model)):
        if not isinstance(model.get_submodule(p.module), nn.Linear):
            raise LyapunovPruneError(f"{p.module} is not a Linear module, which a recipe needs; leave it out")
        groups.setdefault(_bits(report, p.name), {})[p.module] = None
    named = {name for width, names in groups.items() if width != DENSE for name in names}
    size = report.group_size
    grid: dict[str, Any] = {"type": "int", "symmetric": True, "strategy": "group" if size else "channel"}
    grid |= {"group_size": size} if size else {}
    modifier = {
        "ignore": [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in named],
        "config_groups": {
            f"group_{number}": {"targets": [*names], "weights": {"num_bits": width, **grid}}
            for number, (width, names) in enumerate(sorted(groups.items()))
            if width != DENSE
        },
    }
    kind = {"gptq": "GPTQModifier", "awq": "AWQModifier"}.get(report.method, "QuantizationModifier")
    return yaml.safe_dump({"quantization_stage": {"quantization_modifiers": {kind: modifier}}}, sort_keys=False)


def llama_cpp_overrides(report: CompressionReport) -> str:
    """Options of `llama-quantize`, a line a width: `--tensor-type blk\\.(0|29)\\.=q8_0` for layers 0 and 29.

    llama.cpp names the tensors of layer l `blk.l.…` and reads the pattern as a regular expression, so a line covers all
    matrices of its layers. Its types have scales of their own and differ from the grids of this program. Raises
    LyapunovPruneError for amounts other than bits, and for a layer whose matrices differ in bits.
    """
    layers: dict[int, dict[int, None]] = {}
    for matrix in report.matrices:
        layers.setdefault(_bits(report, matrix.name), {})[matrix.layer] = None
    every = [layer for of in layers.values() for layer in of]
    if len(every) != len({*every}):
        raise LyapunovPruneError("a layer has matrices of several widths, and an override names whole layers")
    lines = [f"--tensor-type blk\\.({'|'.join(map(str, of))})\\.={_TYPES[bits]}" for bits, of in sorted(layers.items())]
    return "\n".join(lines) + "\n"


def _bits(report: CompressionReport, name: str) -> int:
    bits, unit = report.allocation.of(name), report.allocation.unit
    if unit != "bits" or bits % 1:
        raise LyapunovPruneError(f"recipes name whole bits, not {unit} of {bits:g}; round to --bits 2 or more")
    return int(bits)
