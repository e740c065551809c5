"""Checkpoints of packed integers: as another program packs them, and with a fault in what is packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from helpers import WEIGHTS, edit_json
from safetensors.torch import load_file, save_file

from lyapunov_prune.compression.grids import Grid, stepped
from lyapunov_prune.export.packed import Packing
from lyapunov_prune.models.readers.compressed_tensors import PACK

Spoil = Callable[[dict[str, torch.Tensor]], None]


def symmetric_grid(W: torch.Tensor, bits: int, group_size: int | None = None) -> Grid:
    """`W` rounded to the nearest points of symmetric grids, as integers and scales."""
    steps = stepped(W, bits, group_size, symmetric=True)
    return Grid(steps.integers(W.double()).to(torch.int8), steps.scale.to(W.dtype))


def pack_others(folder: Path, *dense: str, bits: int = 4, **changes: Any) -> None:
    """Pack the matrices of the layers in `folder` as another program does, those whose names hold one of `dense` aside.

    `changes` are of the quantization config.
    """
    state, ignore = {}, ["lm_head"]
    for key, W in load_file(folder / WEIGHTS).items():
        name = key.removesuffix(".weight")
        if W.ndim == 2 and ".layers." in key and not any(part in key for part in dense):
            grid = symmetric_grid(W, bits)
            state[f"{name}.weight_packed"] = pack_to_int32(grid.integers, bits)
            state |= {f"{name}.weight_scale": grid.scale, f"{name}.weight_shape": torch.tensor(W.shape)}
        else:
            state[key] = W
            ignore += [name] if any(part in key for part in dense) else []
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    config = {
        "quant_method": "compressed-tensors",
        "format": PACK,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": PACK}},
    }
    edit_json(folder / "config.json", quantization_config=config | changes)


def pack_with_zero_points(folder: Path) -> None:
    """`pack_others` in 4 bits, with a packed zero point for each row, which compressed-tensors itself packs."""
    pack_others(folder)
    state = load_file(folder / WEIGHTS)
    for key in [key for key in state if key.endswith(".weight_scale")]:
        zeros = torch.arange(len(state[key]))[:, None] % 16 - 8
        packed = pack_to_int32(zeros.to(torch.int8), 4, packed_dim=0).contiguous()
        state[key.replace("weight_scale", "weight_zero_point")] = packed
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    settings["config_groups"]["group_0"]["weights"]["symmetric"] = False
    edit_json(folder / "config.json", quantization_config=settings)


def spoil_what_is_packed(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    stored = Packing.stored

    def wrong(self: Packing, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state = stored(self, tensors)
        with suppress(KeyError):  # of a layer the fault is not in
            spoil(state)
        return state

    monkeypatch.setattr(Packing, "stored", wrong)


def one_integer(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.5.mlp.down_proj.weight_packed"][3, 2] += 1


def one_scale(state: dict[str, torch.Tensor]) -> None:
    scale = state["model.layers.0.self_attn.q_proj.weight_scale"]
    scale[4, 0] = scale[4, 0].nextafter(torch.tensor(torch.inf))


def one_lost(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.self_attn.o_proj.weight_scale"]


def zeros(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.1.self_attn.o_proj.weight_packed"].zero_()
