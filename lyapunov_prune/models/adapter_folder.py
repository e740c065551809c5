"""LoRA adapters in a folder as peft saves them: the base model they belong to, and all of their tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, first_of, require_extra
from lyapunov_prune.models.folder import ADAPTER_CONFIG, loading_errors

WEIGHTS = "adapter_model.safetensors"
_OTHER_SHAPE = re.compile(r"size mismatch for (\S+): .*?Size\((.*?)\) from checkpoint, .*?Size\((.*?)\)")


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
                f"{other[1]} of the adapters in {folder} has shape {other[2]}, and {other[3]} by its config and the "
                "model (the vocabulary may have been extended); merge them with the tool that made them"
            ) from None
    missing = sorted(key for key in loaded.missing_keys if "lora_" in key and ".default" in key)
    strange = sorted(loaded.unexpected_keys)
    if missing or strange:
        raise LyapunovPruneError(
            f"the adapters in {folder} do not fit their config: {len(missing)} tensors are missing and "
            f"{len(strange)} do not fit anywhere ({(missing + strange)[0]}); fetch them again"
        )
    return adapted
