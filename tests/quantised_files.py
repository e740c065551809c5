"""Stand-ins for quantised checkpoints: the tensors that each method stores, by name, with random bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers import WEIGHTS, edit_json
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEAR = ".layers."


def _bytes(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.rand(shape, generator=generator).to(dtype)
    made = torch.randint(0, 100, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return made.view(dtype)


def fp8(name: str, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    return {
        f"{name}.weight": _bytes(rows, columns, dtype=torch.float8_e4m3fn, seed=seed),
        f"{name}.weight_scale_inv": _bytes(1, 1, dtype=torch.float32, seed=seed + 1),
    }


def float8(name: str, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    return {
        f"{name}.weight": _bytes(rows, columns, dtype=torch.float8_e4m3fn, seed=seed),
        f"{name}.weight_scale": _bytes(rows, 1, dtype=torch.bfloat16, seed=seed + 1),
        f"{name}.input_scale": _bytes(1, dtype=torch.bfloat16, seed=seed + 2),
    }


def gptq(name: str, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    return {
        f"{name}.qweight": _bytes(columns // 8, rows, dtype=torch.int32, seed=seed),
        f"{name}.qzeros": _bytes(1, rows // 8, dtype=torch.int32, seed=seed + 1),
        f"{name}.scales": _bytes(1, rows, dtype=torch.float16, seed=seed + 2),
        f"{name}.g_idx": torch.zeros(columns, dtype=torch.int32),
    }


def awq(name: str, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    return {
        f"{name}.qweight": _bytes(columns, rows // 8, dtype=torch.int32, seed=seed),
        f"{name}.qzeros": _bytes(1, rows // 8, dtype=torch.int32, seed=seed + 1),
        f"{name}.scales": _bytes(1, rows, dtype=torch.float16, seed=seed + 2),
    }


def bnb_4bit(name: str, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    return {
        f"{name}.weight": _bytes(rows * columns // 2, 1, dtype=torch.uint8, seed=seed),
        f"{name}.weight.absmax": _bytes(rows, dtype=torch.uint8, seed=seed + 1),
        f"{name}.weight.quant_map": torch.linspace(-1, 1, 16),
        f"{name}.weight.nested_absmax": _bytes(1, dtype=torch.float32, seed=seed + 2),
        f"{name}.weight.nested_quant_map": torch.linspace(-1, 1, 256),
        f"{name}.weight.quant_state.bitsandbytes__nf4": _bytes(40, dtype=torch.uint8, seed=seed + 3),
    }


def bnb_8bit(name: str, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    return {
        f"{name}.weight": _bytes(rows, columns, dtype=torch.int8, seed=seed),
        f"{name}.SCB": _bytes(rows, dtype=torch.float32, seed=seed + 1),
        f"{name}.weight_format": torch.zeros((), dtype=torch.uint8),
    }


Pack = Callable[[str, int, int, int], dict[str, Tensor]]
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
# What each stores for a matrix, and its settings; `{model}` stands for what comes before `layers` in names of modules.
METHODS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "fp8": (
        fp8,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [
                "lm_head",
                "{model}layers.1.self_attn.o_proj",
                "{model}layers.3.self_attn.o_proj",
            ],
        },
    ),
    "compressed-tensors": (
        float8,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head", "re:.*layers\\.(1|3)\\.self_attn\\.o_proj"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOAT8, "input_activations": FLOAT8}},
        },
    ),
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "desc_act": False,
            "modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.up_proj", "mlp.gate_proj"]],
            "dynamic": {
                "-:{model}layers\\.1\\.self_attn\\.o_proj": {},
                "-:{model}layers\\.3\\.self_attn\\.o_proj": {},
                "+:.*\\.4\\..*down.*": {"bits": 8},
            },
        },
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["{model}layers.1.self_attn.o_proj", "{model}layers.3.self_attn.o_proj"],
        },
    ),
    "bitsandbytes, 4 bits": (
        bnb_4bit,
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["lm_head", "layers.1.self_attn.o_proj", "layers.3.self_attn.o_proj"],
        },
    ),
    "bitsandbytes, 8 bits": (
        bnb_8bit,
        {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "llm_int8_skip_modules": ["lm_head", "layers.1.self_attn.o_proj", "layers.3.self_attn.o_proj"],
        },
    ),
}


def quantise(folder: Path, method: str, path: str = "model.") -> None:
    """Store the matrices of the layers in `folder` as `method` does, but o_proj of layers 1 and 3.

    `path` is what the names of modules in the settings begin with.
    """
    pack, settings = METHODS[method]
    state: dict[str, Tensor] = {}
    for seed, (key, W) in enumerate(load_file(folder / WEIGHTS).items()):
        name, apart = key.removesuffix(".weight"), any(f".{i}.self_attn.o_proj" in key for i in (1, 3))
        text = LINEAR in key and "vision" not in key
        state |= pack(name, *W.shape, 10 * seed) if text and W.ndim == 2 and not apart else {key: W}
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    told = json.loads(json.dumps(settings).replace("{model}", path))
    edit_json(folder / "config.json", quantization_config=told)
