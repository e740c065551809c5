"""One table of what families need beyond the general rules, and the list of families that are judged.

The general rules build a model (pruning/edit.py) of a config in which they slice everything that describes single
layers (settings.py), and find the matrices of a layer (projections.py). An entry here holds only what these rules
cannot know; most families need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from lyapunov_prune.models import adaptations as adapt
from lyapunov_prune.models import held_together as together
from lyapunov_prune.models.adaptations import Cut

# Module attributes that hold the position of the layer.
POSITION_ATTRIBUTES = ("layer_idx", "layer_id", "layer_number")
# Families whose every kind of removal the tests put through the gate: their pruned models are returned without it. All
# other decoders have to pass the gate first.
TRUSTED = frozenset({"gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3"})
# The order of the rows of a fused matrix: all queries, keys and values, each head by head; the query, key and value of
# one head after another; all queries, then the fewer keys and values of grouped-query attention; the gate, then the up.
Fused = Literal["parts by head", "heads by part", "grouped", "gate, up"]
# Families whose mask is causal although neither their config nor their attention says so.
CAUSAL_BY_MASK = frozenset({"gpt_neox_japanese"})
# Part of the name of a class -> why its weights are no matrices.
UNTAKEN = {
    "Convolution": "convolutions, whose inputs are windows of tokens",
    "HyperConnection": "weights of hyper-connections, which mix the parallel states of a token",
}
_EXPERTS = "num_experts"
# Class of a module that multiplies by bare parameters -> the path of each -> whether its matrices are stored input ×
# output, and the attribute with their number if the parameter has no axis for them.
BARE: dict[str, dict[str, tuple[bool, str]]] = {
    "DbrxExperts": {"mlp.w1": (False, _EXPERTS), "mlp.v1": (False, _EXPERTS), "mlp.w2": (True, _EXPERTS)},
    "DeepseekV4GroupedLinear": {"weight": (False, "n_groups")},
    "InklingRelativeLogits": {"proj": (True, "")},
    "Inkling2RelativeLogits": {"proj": (True, "")},
    "InklingSharedExperts": dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (False, "")),
    "RecurrentGemmaRglru": dict.fromkeys(("input_gate_weight", "recurrent_gate_weight"), (True, "")),
    "ZambaMambaMixer": dict.fromkeys(("x_proj_weight", "dt_proj_weight"), (False, "")),
}


@dataclass(frozen=True)
class Family:
    """A family's exceptions to the general rules.

    `adapt(cut)` completes the config, or returns why that is impossible. If `changes(config)`, `fold(layers, kept)`
    recomputes weights of the layers that are left, which rounds them. `renamed(cut, name)` is the name of a module in
    the new model, by its name after the general rule; None if it is removed. `fused` gives,
    by the last part of a module's name, the order of the rows of its matrix. `transposed`: experts are stored input ×
    output although their module does not say so.
    """

    adapt: Callable[[Cut], str | None] = lambda cut: None
    changes: Callable[[Any], bool] = lambda config: False
    fold: Callable[[nn.ModuleList, tuple[int, ...]], None] = lambda layers, kept: None
    renamed: Callable[[Cut, str], str | None] = lambda cut, name: name
    fused: Mapping[str, Fused] = field(default_factory=dict)
    transposed: bool = False


FAMILIES: dict[str, Family] = {
    "beam": Family(adapt=adapt.only_the_end),
    "bloom": Family(fused={"query_key_value": "heads by part"}),
    "diffllama": Family(adapt=adapt.diffllama, changes=lambda config: True, fold=adapt.fold_diffllama),
    "ernie4_5_moe": Family(adapt=adapt.ernie_experts),
    "gemma3n_text": Family(adapt=together.shared_keys),
    "gemma4_text": Family(adapt=together.gemma4),
    "gemma4_unified_text": Family(adapt=together.gemma4),
    "glm": Family(fused={"gate_up_proj": "gate, up"}),
    "glm4": Family(fused={"gate_up_proj": "gate, up"}),
    "glm_moe_dsa": Family(adapt=together.shared_index),
    "gpt2": Family(
        changes=lambda config: config.scale_attn_by_inverse_layer_idx,
        fold=adapt.fold_gpt2,
        fused={"c_attn": "parts by head"},
    ),
    "gpt_neo": Family(adapt=adapt.attention_types),
    "gpt_neox": Family(fused={"query_key_value": "heads by part"}),
    "granite4_vision_text": Family(adapt=adapt.image_layers),
    "hy_v4": Family(adapt=together.shared_index),
    "inkling2_text": Family(adapt=adapt.refused("every block of layers reads the outputs of all blocks before it")),
    "jamba": Family(adapt=adapt.jamba),
    "llama4": Family(transposed=True),
    "llama4_text": Family(transposed=True),
    "longcat_flash": Family(adapt=adapt.longcat),
    "minicpm3": Family(adapt=adapt.residual_scale),
    "minimax": Family(adapt=adapt.first_has_attention),
    "mpt": Family(fused={"Wqkv": "parts by head"}),
    "olmo_hybrid": Family(adapt=adapt.has_linear_attention),
    "phi3": Family(fused={"qkv_proj": "grouped", "gate_up_proj": "gate, up"}),
    "qwen4_exp_text": Family(adapt=adapt.ngram_layers),
    "recurrent_gemma": Family(adapt=adapt.block_types),
    "zamba": Family(adapt=together.zamba),
    "zamba2": Family(adapt=together.zamba2, renamed=together.zamba2_names),
}
_NAMES = """
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird bigbird_pegasus
biogpt bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl
cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note dots3_note_text
electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma
gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm4_moe
glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite
granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
hy_v4 hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2
lfm2_moe lfm3 llama llama4 llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash
minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder
moss_transcribe_diarize mpt mvp nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus
persimmon phi phi3 phi4_multimodal phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
qwen3_moe qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer
seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm-roberta xlm-roberta-xl xmod youtu
zamba zamba2 zaya
"""
JUDGED = frozenset(_NAMES.split())
