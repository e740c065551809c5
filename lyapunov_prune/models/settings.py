"""What the config of a model says of its forward: part of which model it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from lyapunov_prune.models.quantised import is_packed
from lyapunov_prune.results.result import encode

# Settings that change no forward in eval mode: bookkeeping, what is returned beside the logits, how the weights were
# drawn or trained, labels, and tokens that only a tokenizer or `generate` looks at. Every other one counts.
_NO_EFFECT = re.compile(
    r"_.*|architectures|auto_map|transformers_version|transformers_weights|(torch_)?dtype|torchscript|tokenizer_class"
    r"|(attn|experts)_implementation|use_cache|chunk_size_feed_forward|gradient_checkpointing|pretraining_tp"
    r"|return_dict|output_\w+|initializer_\w+|init_std|\w*(dropout|pdrop|layerdrop|drop_path)\w*|\w*loss\w*"
    r"|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params"
    r"|(bos|eos|sep|cls|mask|unk|decoder_start|forced_\w+)_token_id"
)


def forward_settings(model: PreTrainedModel) -> dict[str, Any]:
    """The settings of `model` that can change a forward, as JSON holds them; one of a config inside is `inner.name`.

    They are those of the parsed config, so it does not matter whether a file names a default.
    """
    without = {"quantization_config"} if not is_packed(model) else set()
    if not any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        without.add("pad_token_id")  # else positions are counted from it
    found = {prefix + name: value for prefix, name, value in _settings(model.config) if name not in without}
    return json.loads(json.dumps(encode(found), default=lambda value: type(value).__name__))


def _settings(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    for name, value in config.to_dict().items():
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig):
            yield from _settings(inner, f"{prefix}{name}.")
        elif not _NO_EFFECT.fullmatch(name):
            yield prefix, name, value
