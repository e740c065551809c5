"""By which kernels a model computes goes along when it is loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families.control import verify_intact
from families.zoo import make_zoo
from helpers import make_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from lyapunov_prune.models.device import kernels


def test_a_plain_model_has_one_of_each() -> None:
    model: Any = make_tiny("llama")
    assert kernels(model.config) == {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    model.set_attn_implementation("eager")
    assert kernels(model.config)["attn_implementation"] == "eager"


def test_each_part_has_its_own() -> None:
    config = AutoConfig.for_model("llava")
    config._attn_implementation = {"": "eager", "text_config": "sdpa", "vision_config": "eager"}
    told = kernels(config)["attn_implementation"]
    assert told == {"": "eager", "text_config": "sdpa", "vision_config": "eager"}
    again = AutoConfig.for_model("llava")
    again._attn_implementation = told
    assert again.text_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "got_ocr2"])
def test_the_gate_reloads_by_the_kernels_of_the_model(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Mixtral's experts in a loop, which float64 needs; GOT-OCR 2's decoder by another attention than its tower."""
    model = make_zoo(family).to(dtype)
    model.save_pretrained(tmp_path)
    options: dict[str, Any] = {"experts_implementation": "eager"} if family == "mixtral" else {}
    loaded = AutoModelForCausalLM if family == "mixtral" else type(model)
    (reloads,) = (
        check
        for check in verify_intact(loaded.from_pretrained(tmp_path, dtype=dtype, **options).eval()).checks
        if check.name == "reloads as saved"
    )
    assert reloads.passed, reloads
