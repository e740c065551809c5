"""LoRA adapters: those in a folder as peft saves them, with their base model, and merging them into its weights."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, first_of, reported, require_extra
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.folder import ADAPTER_CONFIG, loading_errors
from lyapunov_prune.models.structure import in_eval_mode, random_ids
from lyapunov_prune.progress import warn

WEIGHTS = "adapter_model.safetensors"
_OTHER_SHAPE = re.compile(r"size mismatch for (\S+): .*?Size\((.*?)\) from checkpoint, .*?Size\((.*?)\)")
_TOKENS = 64
# Largest deviation of the logits after merging, relative to their spread. A merged weight is rounded once more, and
# layers amplify that on random tokens: SmolLM2-135M gives 0.00001 in float32, 0.01 in float16 and 0.1 in bfloat16.
_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.5}
_ELSEWHERE = "merge them with the tool that made them"


def holds_adapters(folder: Path) -> bool:
    """Whether `folder` holds only adapters; adapters beside a model are refused when that model is loaded."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The name of the base model that the adapters in `folder` were trained for.

    Raises LyapunovPruneError for adapters that are not LoRA: some other kinds read further files.
    """
    with loading_errors(folder):
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base, kind = config["base_model_name_or_path"], config["peft_type"]
    wrong = {
        f"hold no {WEIGHTS}; convert them to safetensors": not (folder / WEIGHTS).is_file(),
        f"are {kind}, not LORA; merge them with the tool that made them": kind != "LORA",
        f"name no base model; set base_model_name_or_path in {ADAPTER_CONFIG}": not (isinstance(base, str) and base),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"the adapters in {folder} {why}")
    return str(base)


def attach_adapters(model: PreTrainedModel, folder: Path) -> Any:
    """Attach the adapters in `folder` to `model`, in place; returns a `peft.PeftModel`.

    peft leaves tensors that the file lacks at their random initial values and ignores unknown ones. This function
    raises LyapunovPruneError instead, unless the tensors of the file and of the model match one to one, in shape too.
    """
    require_extra("peft", "lora", "merging adapters")
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    with loading_errors(folder):
        adapted = PeftModel(model, LoraConfig.from_pretrained(str(folder)))
        try:
            loaded: Any = set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
        except RuntimeError as error:
            other = _OTHER_SHAPE.search(str(error))
            if other is None:
                raise
            raise LyapunovPruneError(
                f"{other[1]} of the adapters in {folder} has shape {other[2]}, not {other[3]} (an extended "
                "vocabulary?); merge them with the tool that made them"
            ) from None
    missing = sorted(key for key in loaded.missing_keys if "lora_" in key and ".default" in key)
    strange = sorted(loaded.unexpected_keys)
    if missing or strange:
        raise LyapunovPruneError(
            f"the adapters in {folder} do not fit their config: {len(missing)} tensors missing, {len(strange)} without "
            f"a place ({(missing + strange)[0]}); fetch them again"
        )
    return adapted


@in_eval_mode
def merge_adapters(model: Any) -> PreTrainedModel:
    """Add the LoRA adapters of `model` to its weights, `W + s·BA`, in place; returns the base model.

    `model` is a `peft.PeftModel`, or a transformers model after `load_adapter`. If an adapter changes only one of two
    tied embeddings, they are untied. The logits of the merged model are compared with those of the adapted one. Raises
    LyapunovPruneError if peft (the extra `lora`) is missing, if an adapted weight is shared with another module, if the
    logits differ, or if the adapters cannot be merged for another reason.
    """
    require_extra("peft", "lora", "merging adapters")
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    failures = ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError
    with reported("the adapters cannot be merged", _ELSEWHERE, *failures):
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        configs = base.config, base.config.get_text_config(decoder=True)
        inputs, tied = _inputs(base), any(getattr(config, "tie_word_embeddings", False) for config in configs)
        adapted = model(**inputs).logits
        _untie_embeddings(base, LoraLayer)
        if why := _unmergeable(base, LoraLayer):
            raise LyapunovPruneError(f"{why}; {_ELSEWHERE}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from peft, about tying, which is handled here
            if isinstance(model, PeftModel):
                model = model.merge_and_unload(safe_merge=True)
        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge(safe_merge=True)
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, module.get_base_layer())
        model.__dict__.pop("peft_config", None)
        model._hf_peft_config_loaded = False
        if tied:
            _settle_tying(model)
        merged = model(**inputs).logits
    off, limit = _deviation(merged, adapted), _LIMITS[model.dtype]
    if not off <= limit:
        raise LyapunovPruneError(
            f"merging the adapters changes the logits by {off:.2g} of their spread (limit {limit:g}): they do more "
            f"than add to weights, or one has no effect; {_ELSEWHERE}"
        )
    return model


def _inputs(base: PreTrainedModel) -> dict[str, Any]:
    config = base.config.get_text_config(decoder=True)
    length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    return {"input_ids": random_ids(config, 1, length).to(base.device), "use_cache": False}


def _deviation(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """`‖z − z'‖ / ‖z' − mean z'‖` over all tokens, the mean over the vocabulary; NaN if any logit is NaN."""
    z, wanted = lift(logits), lift(reference)
    spread = torch.linalg.vector_norm(wanted - wanted.mean(-1, keepdim=True))
    return float(torch.linalg.vector_norm(z - wanted) / spread.clamp_min(1e-300))


def _untie_embeddings(base: Any, adapter: Any) -> None:
    """Give the head its own weights if it shares those of the embedding and an adapter changes one of the two."""
    pair = base.get_output_embeddings(), base.get_input_embeddings()
    head, table = (module.get_base_layer() if isinstance(module, adapter) else module for module in pair)
    if any(isinstance(module, adapter) for module in pair) and _one_weight(head, table):
        head.weight = nn.Parameter(head.weight.clone(), head.weight.requires_grad)


def _one_weight(head: nn.Module | None, table: nn.Module | None) -> bool:
    weight = getattr(head, "weight", None)
    return weight is not None and weight is getattr(table, "weight", None)


def _unmergeable(base: Any, adapter: Any) -> str | None:
    """Why merging would change more than the adapted weights; None if it would not."""
    if any(getattr(config, "layer_replication", None) for config in getattr(base, "peft_config", {}).values()):
        return (
            "the adapters repeat layers (layer_replication) that share their weights, and no merged checkpoint can "
            "store that"
        )
    owners = Counter(id(p) for module in base.modules() for p in module.parameters(recurse=False) if p.ndim > 1)
    for name, module in base.named_modules():
        if isinstance(module, adapter) and any(owners[id(p)] > 1 for p in module.get_base_layer().parameters()):
            return f"{name} shares its weights with another module that has a different adapter"
    return None


def _settle_tying(merged: PreTrainedModel) -> None:
    """Record in the config that the embeddings are no longer tied; otherwise loading would tie them again."""
    head, table = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head is None or _one_weight(head, table):
        return
    for config in (merged.config, merged.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    warn("the adapters change one of two tied embeddings; the merged model stores both and is larger by one")
