"""The families whose intact control passed in `docs/families.md`, by model type; a test holds the two together.

Removal in memory puts any other decoder through the gate. On disk nothing is run, so there it is refused.
"""

from __future__ import annotations

_NAMES = """
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird bigbird_pegasus
biogpt bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl
cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note dots3_note_text
electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2
gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm4_moe
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
