"""LoRA adapters in a folder as peft saves them, with their base model, merged by peft into its weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, first_of, reported, require_extra
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.folder import ADAPTER_CONFIG, loading_errors
from lyapunov_prune.models.structure import in_eval_mode, random_ids

WEIGHTS = "adapter_model.safetensors"
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


@in_eval_mode
def merge_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add the LoRA adapters in `folder` to the weights of their base `model`, `W + s·BA`, in place; returns it.

    peft leaves tensors that the file lacks at their initial values, and changes a weight that modules share for all of
    them. So LyapunovPruneError is raised unless the tensors of the file and of its config match one to one, and the
    logits after merging are those before; also if peft (the extra `lora`) is missing.
    """
    require_extra("peft", "lora", "merging adapters")
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    config = model.config.get_text_config(decoder=True)
    length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    tied = _tied(model)
    inputs = {"input_ids": random_ids(config, 1, length).to(model.device), "use_cache": False}
    with reported(f"the adapters in {folder} cannot be merged", _ELSEWHERE, Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from peft, about tied weights
        adapted = PeftModel(model, LoraConfig.from_pretrained(str(folder))).eval()
        loaded: Any = set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
        missing = sorted(key for key in loaded.missing_keys if "lora_" in key and ".default" in key)
        if strange := missing + sorted(loaded.unexpected_keys):
            raise LyapunovPruneError(
                f"the adapters in {folder} do not fit their config: {len(missing)} tensors missing, "
                f"{len(strange) - len(missing)} without a place ({strange[0]}); fetch them again"
            )
        wanted = lift(adapted(**inputs).logits)
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
        found = lift(merged(**inputs).logits)
    spread = torch.linalg.vector_norm(wanted - wanted.mean(-1, keepdim=True)).clamp_min(1e-300)
    off, limit = float(torch.linalg.vector_norm(found - wanted) / spread), _LIMITS[merged.dtype]
    wrong = {
        f"changes the logits by {off:.2g} of their spread (limit {limit:g}): they do more than add to weights, or add "
        "to weights that modules share": not off <= limit,
        "parts two tied embeddings": tied and not _tied(merged),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"merging the adapters in {folder} {why}; {_ELSEWHERE}")
    return merged


def _tied(model: PreTrainedModel) -> bool:
    """Whether embedding and head are one tensor."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    return getattr(head, "weight", None) is getattr(table, "weight", None)
