"""Recipes for other quantisers, read back by what can read them here: YAML, compressed-tensors, and the patterns."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from compressed_tensors.quantization import QuantizationConfig
from gguf import GGMLQuantizationType
from helpers import LAYERS, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune import compress
from lyapunov_prune.compression import CompressionReport
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.recipes import llama_cpp_overrides, llm_compressor_recipe
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections

WIDTHS = np.array([8.0, 3.0, 4.0, 4.0, 16.0, 8.0])


def reported(model: PreTrainedModel, group_size: int | None = 8) -> CompressionReport:
    report = compress(model, method="rtn", bits=4, group_size=group_size).report
    by_layer = replace(report.allocation, amount=WIDTHS[list(report.allocation.layers)])
    return replace(report, allocation=by_layer)


@pytest.mark.parametrize("group_size", [8, None])
def test_a_recipe_names_every_matrix_once_by_its_width(group_size: int | None, llama: PreTrainedModel) -> None:
    recipe = yaml.safe_load(llm_compressor_recipe(llama, reported(llama, group_size)))
    modifier = recipe["quantization_stage"]["quantization_modifiers"]["QuantizationModifier"]
    config = QuantizationConfig(config_groups=modifier["config_groups"], ignore=modifier["ignore"])
    found = {name: g.weights.num_bits for g in config.config_groups.values() for name in g.targets}
    wanted = {p.module: int(WIDTHS[p.layer]) for p in find_projections(wrap(llama))}
    assert found == {name: bits for name, bits in wanted.items() if bits != 16}
    assert {*modifier["ignore"]} == {"lm_head", *(name for name, bits in wanted.items() if bits == 16)}
    for group in config.config_groups.values():
        assert (group.weights.symmetric, group.weights.group_size) == (True, group_size)
    for method, kind in (("gptq", "GPTQModifier"), ("awq", "AWQModifier")):
        assert kind in llm_compressor_recipe(llama, replace(reported(llama), method=method))


def test_overrides_match_the_tensors_of_their_layers_alone(llama: PreTrainedModel) -> None:
    lines = llama_cpp_overrides(reported(llama)).splitlines()
    assert lines[0] == r"--tensor-type blk\.(1)\.=q3_k"
    types = dict(line.removeprefix("--tensor-type ").split("=") for line in lines)
    for layer in [*range(LAYERS), 10, 14]:
        found = [kind for pattern, kind in types.items() if re.search(pattern, f"blk.{layer}.attn_q.weight")]
        assert found == ([{3: "q3_k", 4: "q4_k", 8: "q8_0", 16: "f16"}[WIDTHS[layer]]] if layer < LAYERS else [])
    for kind in types.values():
        assert kind.upper() in GGMLQuantizationType.__members__


def test_what_has_no_widths_is_refused(llama: PreTrainedModel) -> None:
    sparse = compress(llama, method="magnitude", sparsity=0.5).report
    for recipe in (llm_compressor_recipe(llama, reported(llama)), llama_cpp_overrides(reported(llama))):
        assert recipe.endswith("\n")
    with pytest.raises(LyapunovPruneError, match="whole bits, not sparsity"):
        llm_compressor_recipe(llama, sparse)
    with pytest.raises(LyapunovPruneError, match="whole bits, not sparsity"):
        llama_cpp_overrides(sparse)
    ternary = compress(llama, method="rtn", bits=1.58).report
    for refused in (lambda: llm_compressor_recipe(llama, ternary), lambda: llama_cpp_overrides(ternary)):
        with pytest.raises(LyapunovPruneError, match=r"1\.58"):
            refused()
    gpt2 = make_tiny("gpt2")
    with pytest.raises(LyapunovPruneError, match="not a Linear module"):
        llm_compressor_recipe(gpt2, reported(gpt2))
    mixed = reported(llama)
    amount = mixed.allocation.amount.copy()
    amount[0] = 2
    with pytest.raises(LyapunovPruneError, match="several widths"):
        llama_cpp_overrides(replace(mixed, allocation=replace(mixed.allocation, amount=amount)))
