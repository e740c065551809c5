"""What was saved comes back the same, or the check says what did not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import make_tiny
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import GateCheck, changed_setting, reload_check
from lyapunov_prune.models.decoder import wrap_any


@torch.no_grad()
def check(model: PreTrainedModel, folder: Path) -> GateCheck:
    return reload_check(wrap_any(model), folder, [torch.arange(3, 19).view(2, 8)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_saved_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Cast to bfloat16 the rotary tables are rounded, and those of the reloaded model are not."""
    model = make_tiny("llama").to(dtype)
    model.save_pretrained(tmp_path)
    assert check(model, tmp_path).passed


def test_keys_and_numbers_are_compared(tmp_path: Path) -> None:
    model = make_tiny("llama")
    model.save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    weights = load_file(file)
    save_file(weights | {name: 1.01 * weights[name]}, file, {"format": "pt"})
    assert check(model, tmp_path).detail == "logits after plain from_pretrained"
    assert not check(model, tmp_path).passed
    save_file(weights | {"stray": torch.zeros(1)}, file, {"format": "pt"})
    assert check(model, tmp_path).detail == "1 unexpected keys on reloading, first stray"
    del weights[name]
    save_file(weights, file, {"format": "pt"})
    assert check(model, tmp_path).detail == f"1 missing keys on reloading, first {name}"


def test_what_came_back_as_it_was_is_held_once(tmp_path: Path) -> None:
    model = make_tiny("llama")
    model.save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    weights = load_file(file)
    save_file(weights | {name: torch.nextafter(weights[name], torch.tensor(9.0))}, file, {"format": "pt"})
    apart: list[str] = []

    def look(reloaded: PreTrainedModel) -> str:
        places = {p.data_ptr() for p in model.parameters()}
        apart.extend(key for key, p in reloaded.named_parameters() if p.data_ptr() not in places)
        return ""

    with torch.no_grad():
        assert reload_check(wrap_any(model), tmp_path, [torch.arange(3, 19).view(2, 8)], look).measured > 0
    assert apart == [name]


def test_a_setting_and_a_number_of_a_layer_are_compared() -> None:
    one, other = make_tiny("llama"), make_tiny("llama")
    assert changed_setting(one.model.layers, other.model.layers) is None
    other.model.layers[3].self_attn.layer_idx = 4
    assert changed_setting(one.model.layers, other.model.layers) == "layer 3 holds layer_idx 3, and 4 after reloading"
    other.model.layers[1].self_attn.window = 8
    one.model.layers[1].self_attn.window = 16
    assert (
        changed_setting(one.model.layers, other.model.layers) == "layer 1 came back with self_attn.window = 8, not 16"
    )


@pytest.mark.parametrize("by", [1.05, 1.0001, 1 + 1e-9])
def test_a_scale_that_is_a_little_another_is_another(by: float) -> None:
    """The planted fault: settings that are compared to 10 %."""
    one, other = make_tiny("llama"), make_tiny("llama")
    scaling = one.model.layers[3].self_attn.scaling
    other.model.layers[3].self_attn.scaling = scaling * (1 + 1e-14)  # another order of the same sum
    assert changed_setting(one.model.layers, other.model.layers) is None
    other.model.layers[3].self_attn.scaling = scaling * by
    assert changed_setting(one.model.layers, other.model.layers).startswith(
        "layer 3 came back with self_attn.scaling = "
    )
