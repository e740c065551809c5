"""Everything that a GGUF header says is read: logits equal those of the model that the file was made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from helpers import VOCABULARY, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.export.llama_cpp import engine_check
from lyapunov_prune.models.gguf_copy import pieces_of, write_pieces
from lyapunov_prune.models.gguf_header import BOOL, FLOAT32, Header, Tensor, Value, array, number, read_header, text
from lyapunov_prune.models.gguf_settings import read_settings, shortest
from lyapunov_prune.models.loading import load

SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
COUNTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
STATES = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 8, "ssm.time_step_rank": 4}
# Settings of a tiny model, and keys of its header beside those that all files have.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": ({"n_positions": 200, "n_inner": 96, "num_key_value_heads": None}, {}),
    "falcon": ({"layer_norm_epsilon": 3e-4, "intermediate_size": None}, {"attention.head_count_kv": 1}),
    "starcoder2": ({"sliding_window": None, "norm_epsilon": 3e-4, "rope_theta": 5e4}, {}),
    "stablelm": ({**HALF, "tie_word_embeddings": False}, {"use_parallel_residual": False}),
    "nemotron": ({**HALF, "norm_eps": 3e-4, "tie_word_embeddings": False}, {}),
    "qwen2_moe": (
        {**EXPERTS, "shared_expert_intermediate_size": 48},
        COUNTS | {"expert_shared_feed_forward_length": 48},
    ),
    "qwen3_moe": (
        {**EXPERTS, "norm_topk_prob": True, "head_dim": 32},
        COUNTS | {"attention.key_length": 32, "attention.value_length": 32},
    ),
    "mamba": (
        {"state_size": 8, "intermediate_size": 128, "num_attention_heads": None, "num_key_value_heads": None},
        STATES,
    ),
    "lfm2": (
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
    ),
}
_ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
_BY_RMS = ("qwen2moe", "qwen3moe", "mamba", "lfm2")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path_factory.mktemp("cache")))


def first(config: PreTrainedConfig, *names: str) -> Any:
    return next((found for name in names if (found := getattr(config, name, None)) is not None), None)


def header_values(config: PreTrainedConfig) -> dict[str, Any]:
    heads, rope = first(config, "num_attention_heads") or 0, getattr(config, "rope_parameters", None)
    epsilon = first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    name = _ARCHITECTURES.get(config.model_type, config.model_type)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": first(config, "max_position_embeddings") or 2048,
        "embedding_length": config.hidden_size,
        "feed_forward_length": first(config, "intermediate_size", "n_inner") or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": first(config, "num_key_value_heads") or heads,
        f"attention.layer_norm_{'rms_' * (name in _BY_RMS)}epsilon": epsilon,
        "vocab_size": config.vocab_size,
    }
    if rope:
        head = first(config, "head_dim") or config.hidden_size // heads
        values |= {"rope.freq_base": float(rope["rope_theta"])}
        values |= {"rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1))}
    return values


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The numbers as llama.cpp's converter lays them out."""
    config, made = model.config, {}
    name = _ARCHITECTURES.get(config.model_type, config.model_type)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for own, values in model.state_dict().items():
        called = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "experts.gate_up_proj" in own:
            for part, half in zip(("gate", "up"), values.chunk(2, dim=1), strict=True):
                made[f"blk.{own.split('.')[2]}.ffn_{part}_exps.weight"] = half
            continue
        if "experts.down_proj" in own:
            called += ".weight"
        turned = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
        if name == "gpt2" and called.endswith(turned):
            values = values.T
        if name == "nemotron" and called.endswith("norm.weight"):
            values = values + 1
        if own.endswith("A_log"):
            values = -values.exp()
        if own.endswith(("conv1d.weight", "conv.conv.weight")):
            values = values.squeeze(1)
        if called.endswith("ffn_gate_inp_shexp.weight"):
            values = values[0]
        made[called] = values
    return made


def written(family: str, path: Path) -> tuple[PreTrainedModel, Path]:
    settings, keys = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms and biases are ones and zeros
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    writer = gguf.GGUFWriter(path, _ARCHITECTURES.get(family, family))
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in (header_values(config) | keys).items():
        add[type(value)](f"{writer.arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(VOCABULARY)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for name, values in tensors_of(model).items():
        writer.add_tensor(name, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_computes_what_its_model_does_here_and_in_llama_cpp(family: str, tmp_path: Path) -> None:
    model, path = written(family, tmp_path / "x.gguf")
    loaded = load(path)
    ids = torch.randint(97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        there, here = (each(ids[None]).logits for each in (model, loaded.model))
    assert (there - here).abs().max() < 2e-6
    if installed():
        assert engine_check(path, loaded, ids.tolist()).passed


def described(architecture: str, values: dict[str, Any], layers: int) -> Header:
    """A header with these keys, and one tensor a layer."""
    kinds: dict[type, Callable[[Any], Value]] = {
        int: number,
        float: lambda value: number(value, FLOAT32),
        str: text,
        list: lambda value: array(4, value),
    }
    own = {f"{architecture}.{key}": kinds[type(value)](value) for key, value in values.items()}
    tensors = tuple(Tensor(f"blk.{i}.attn_q.weight", (4, 4), 0, Path("x"), 0, 64) for i in range(layers))
    every = {"general.architecture": text(architecture), **own, f"{architecture}.block_count": number(layers)}
    return Header(Path("x.gguf"), (Path("x.gguf"),), every, tensors, 32)


def test_keys_of_mixtures_that_are_too_large_to_write_here_are_read() -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096}
    config = AutoConfig.for_model("gpt_oss")
    read_settings(
        described("gpt-oss", {**yarn, "rope.freq_base": 1.5e5, "expert_feed_forward_length": 288}, 36), config
    )
    assert config.intermediate_size == 288
    assert (config.rope_parameters["factor"], config.rope_parameters["rope_theta"]) == (32, 1.5e5)
    config = AutoConfig.for_model("minimax_m2", rotary_dim=64, head_dim=128)
    keys = {"expert_feed_forward_length": 99, "rope.dimension_count": 64, "attention.key_length": 128}
    read_settings(described("minimax-m2", keys | {"expert_gating_func": 2}, config.num_hidden_layers), config)
    assert config.intermediate_size == 99


def test_layers_of_several_widths_are_refused_in_a_line() -> None:
    """Gemma 4, also with all layers sharing their keys."""
    config = AutoConfig.for_model("gemma4_text")
    with pytest.raises(LyapunovPruneError, match="gemma4"):
        read_settings(described("gemma4", {"attention.shared_kv_layers": 30}, config.num_hidden_layers), config)


def with_keys(path: Path, values: dict[str, Value], moved: Callable[[str], str] = lambda name: name) -> Path:
    """The file with other keys, and its tensors under other names."""
    header, target = read_header(path), path.with_name("y.gguf")
    pieces = pieces_of(header, range(header.layers), {})
    pieces = [type(piece)(moved(piece.name), piece.source) for piece in pieces]
    write_pieces(target, dict(header.values) | values, pieces, header.alignment)
    return target


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.clamp_kqv", number(5.0, FLOAT32)),
        ("logit_scale", number(0.25, FLOAT32)),
        ("residual_scale", number(0.5, FLOAT32)),
        ("rope.scaling.type", text("longrope")),
        ("rope.scaling.yarn_log_multiplier", number(0.1, FLOAT32)),
        ("rope.scaling.attn_factor", number(2.0, FLOAT32)),
        ("rope.freq_base_swa", number(5e3, FLOAT32)),
        ("rope.dimension_count", number(4)),
        ("attention.value_length", number(4)),
        ("final_logit_softcapping", number(30.0, FLOAT32)),
        ("expert_count", number(8)),
        ("never_heard_of", number(True, BOOL)),
    ],
)
def test_a_key_with_an_effect_and_no_place_is_refused_by_name(
    key: str, value: Value, reader: PreTrainedModel, tmp_path: Path
) -> None:
    path = write_gguf(reader, tmp_path / "x.gguf")
    changed = {f"llama.{key}": value}
    if key == "rope.scaling.type":
        changed["llama.rope.scaling.factor"] = number(2.0, FLOAT32)
    with pytest.raises(LyapunovPruneError, match=key):
        load(with_keys(path, changed))


def test_keys_without_an_effect_change_nothing(reader: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(reader, tmp_path / "x.gguf")
    zero = {f"llama.{key}": number(0) for key in ("expert_count", "expert_used_count", "attention.shared_kv_layers")}
    plain = {"llama.rope.scaling.type": text("none"), "general.whatever": number(3), "quantize.imatrix.file": text("x")}
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(load(with_keys(path, zero | plain)).model(ids).logits, load(path).model(ids).logits)


@pytest.mark.parametrize("new", ["blk.2.attn_sinks.weight", "blk.2.ffn_up.scale", "rope_factors_long.weight"])
def test_a_tensor_that_is_not_taken_is_refused_by_name(new: str, reader: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(reader, tmp_path / "x.gguf")
    header = read_header(path)
    norm = next(tensor for tensor in header.tensors if tensor.name == "output_norm.weight")
    pieces = pieces_of(header, range(header.layers), {})
    write_pieces(tmp_path / "y.gguf", header.values, [*pieces, type(pieces[0])(new, norm)], header.alignment)
    with pytest.raises(LyapunovPruneError, match=new):
        load(tmp_path / "y.gguf")


def test_a_count_of_experts_that_lies_is_refused(tmp_path: Path) -> None:
    _, path = written("qwen3_moe", tmp_path / "x.gguf")
    with pytest.raises(LyapunovPruneError):
        load(with_keys(path, {"qwen3moe.expert_count": number(8)}))


@pytest.mark.parametrize("value", [1e-5, 1e-6, 3e-5, 1e6, 0.1, 5e5, 1.25])
def test_a_number_of_a_header_is_read_to_the_digit(value: float) -> None:
    assert shortest(number(value, FLOAT32).read()) == value
