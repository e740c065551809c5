"""Faults to plant in a model, and changes that are none: what `diagnosis` is tried on, in experiments and tests.

A fault changes a dense model in place, before everything is rounded, and returns the tensors that it touched; a setting
touches none. `kinds` are the kinds of findings that name it rightly.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.gguf_whole import write_gguf
from lyapunov_prune.export.packed import write_packed
from lyapunov_prune.models.ggml import Kind, dequantised, fits, quantised

WIDTH, INNER, HEAD, LAYERS = 64, 128, 16, 5
_SIZES = {
    "vocab_size": 259,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "gemma3_text": {"tie_word_embeddings": True, "query_pre_attn_scalar": HEAD, "sliding_window": 16},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_inner": INNER, "n_positions": 256},
}
# Families in which only faults are planted.
_MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": HEAD, "sliding_window": 16, "final_logit_softcapping": 5.0},
    "qwen3": {},
    "granite": {"residual_multiplier": 0.4, "attention_multiplier": 1 / HEAD},
    "qwen3_moe": {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
    | {"norm_topk_prob": True},
}


def tiny(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of the family in which every layer matters."""
    known = AutoConfig.for_model(family).to_dict()
    given = {
        key: value for key, value in (_SIZES | (FAMILIES | _MORE)[family]).items() if key in known or key == "head_dim"
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and three special ones."""
    vocabulary = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    bpe.normalizer = normalizers.NFC()  # as transformers gives every tokenizer of Qwen2
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@dataclass(frozen=True)
class Fault:
    """A fault by name; `plant` returns the names of the tensors that it touched."""

    name: str
    kinds: tuple[str, ...]
    plant: Callable[[PreTrainedModel], list[str]]
    families: tuple[str, ...] = ("llama", "qwen2", "gemma3_text")


def named(model: PreTrainedModel, pattern: str) -> dict[str, nn.Parameter]:
    """The parameters whose names the pattern matches."""
    found = {name: p for name, p in model.named_parameters() if re.search(pattern, name)}
    assert found, pattern
    return found


def each(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[PreTrainedModel], list[str]]:
    """A fault that changes every parameter whose name the pattern matches."""

    @torch.no_grad()
    def plant(model: PreTrainedModel) -> list[str]:
        found = named(model, pattern)
        for parameter in found.values():
            parameter.copy_(change(parameter.detach().clone()))
        return list(found)

    return plant


def _part(index: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(W: torch.Tensor) -> torch.Tensor:
        W[index] = change(W[index])
        return W

    return changed


def _exchanged(first: str, second: str) -> Callable[[PreTrainedModel], list[str]]:
    @torch.no_grad()
    def plant(model: PreTrainedModel) -> list[str]:
        a, b = named(model, first), named(model, second)
        for one, other in zip(a.values(), b.values(), strict=True):
            before = one.detach().clone()
            one.copy_(other)
            other.copy_(before)
        return [*a, *b]

    return plant


def rotary(W: torch.Tensor, size: int = HEAD) -> torch.Tensor:
    """The rows of heads of this size in the other rotary layout."""
    return W.view(-1, 2, size // 2, *W.shape[1:]).transpose(1, 2).reshape(W.shape)


def _by_group(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda W: change(W.reshape(len(W), -1, 32)).reshape(W.shape)


def _offset(model: PreTrainedModel) -> list[str]:
    touched = []
    with torch.no_grad():
        for i in (1, 2):
            for name, parameter in named(model, rf"layers\.{i}\.|\.h\.{i}\.").items():
                parameter.copy_(model.get_parameter(name.replace(f".{i}.", f".{i + 1}.", 1)))
                touched.append(name)
    return touched


def _stale(model: PreTrainedModel) -> list[str]:
    other = tiny(model.config.model_type, seed=7)
    with torch.no_grad():
        for name, parameter in (found := named(model, r"layers\.[34]\..*(proj|experts).*weight")).items():
            parameter.copy_(other.get_parameter(name))
    return list(found)


def _head_tied(model: PreTrainedModel) -> list[str]:
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)
    return ["lm_head.weight"]


def _experts(model: PreTrainedModel) -> list[str]:
    with torch.no_grad():
        for parameter in (found := named(model, r"layers\.2\..*experts\.(gate_up|down)")).values():
            parameter[[1, 3]] = parameter[[3, 1]]
    return list(found)


def _setting(**values: Any) -> Callable[[PreTrainedModel], list[str]]:
    def plant(model: PreTrainedModel) -> list[str]:
        for name, value in values.items():
            setattr(model.config, name, copy.deepcopy(value))
        return []

    return plant


DOWN, OUT, Q, K, V = (rf"layers\.2\..*{name}_proj.weight" for name in ("down", "o", "q", "k", "v"))
NORMS = r"norm.*weight"
ALL = ("llama", "qwen2", "gemma3_text", "phi3")
FAULTS = (
    Fault(
        "a constant", ("constant",), each(r"layers\.[234]\..*o_proj.weight", lambda W: torch.full_like(W, 0.01)), ALL
    ),
    Fault("zeros", ("zero",), each(DOWN, torch.zeros_like), ALL),
    Fault("NaN", ("non-finite",), each(r"layers\.2\.input_layernorm", _part(3, lambda w: w * torch.nan)), ALL),
    Fault("norms plus one", ("shift",), each(NORMS, lambda w: w + 1), ("llama", "qwen2", "gemma3_text")),
    Fault("inverted sign", ("sign",), each(DOWN, torch.neg), ALL),
    Fault("times 1.5", ("scale",), each(DOWN, lambda W: 1.5 * W), ALL),
    Fault("a row times 3", ("scale",), each(DOWN, _part(5, lambda w: 3 * w)), ALL),
    Fault("a channel times 5", ("scale",), each(DOWN, _part((slice(None), 7), lambda w: 5 * w))),
    Fault("a head times 1.4", ("scale",), each(Q, _part(slice(HEAD, 2 * HEAD), lambda w: 1.4 * w))),
    Fault("transposed", ("transposed",), each(OUT, lambda W: W.T), ("llama", "qwen2")),
    Fault("transposed Conv1D", ("transposed",), each(r"h\.2\.attn\.c_proj.weight", lambda W: W.T), ("gpt2",)),
    Fault("the other rotary layout", ("permuted",), each(r"[qk]_proj.weight", rotary)),
    Fault("heads exchanged", ("permuted",), each(Q, lambda W: W.view(4, HEAD, -1)[[1, 0, 2, 3]].reshape(W.shape))),
    Fault(
        "columns of heads exchanged",
        ("permuted",),
        each(OUT, lambda W: W.view(-1, 4, HEAD)[:, [1, 0, 2, 3]].reshape(W.shape)),
    ),
    Fault("gate and up exchanged", ("exchanged",), _exchanged(r"layers\.2\..*gate_proj", r"layers\.2\..*up_proj")),
    Fault(
        "gate and up exchanged in one tensor",
        ("permuted",),
        each(r"gate_up_proj", lambda W: W.roll(INNER, -2)),
        ("phi3", "mixtral"),
    ),
    Fault("k and v exchanged", ("exchanged",), _exchanged(K, V)),
    Fault("q and o exchanged", ("exchanged",), _exchanged(Q, OUT), ("llama", "qwen2")),
    Fault("layers off by one", ("offset",), _offset, (*ALL, "mixtral", "gpt2")),
    Fault(
        "layers exchanged", ("exchanged",), _exchanged(r"layers\.1\..*(proj|norm)", r"layers\.3\..*(proj|norm)"), ALL
    ),
    Fault("experts exchanged", ("exchanged",), _experts, ("mixtral",)),
    Fault("a stale shard", ("differs",), _stale, (*ALL, "mixtral")),
    Fault("the head is the embedding", ("head",), _head_tied, ("llama", "qwen2", "phi3")),
    Fault("rows of tokens shifted", ("permuted",), each("embed_tokens", lambda W: W.roll(1, 0)), ALL),
    Fault("rows of added tokens zero", ("zero",), each("embed_tokens", _part(slice(250, None), torch.zeros_like)), ALL),
    Fault("the row of EOS zero", ("zero",), each("lm_head", _part(2, torch.zeros_like)), ("llama", "qwen2", "phi3")),
    Fault(
        "zero points off by one",
        ("zero point",),
        each(DOWN, _by_group(lambda w: w + w.abs().amax(-1, keepdim=True) / 8)),
        ALL,
    ),
    Fault(
        "scales of the next block",
        ("block scale",),
        each(DOWN, _by_group(lambda w: w * (s := w.abs().amax(-1, keepdim=True)).roll(1, 1) / s)),
        ALL,
    ),
    Fault(
        "norms exchanged",
        ("exchanged",),
        _exchanged(r"layers\.2\.input_layernorm", r"layers\.2\.post_attention_layernorm"),
        ALL,
    ),
    Fault("a bias zero", ("zero",), each(r"q_proj.bias", torch.zeros_like), ("qwen2",)),
    Fault("clipped", ("saturated",), each(DOWN, lambda W: W.clamp(-0.15, 0.15)), ALL),
    Fault("a block zero", ("zero",), each(DOWN, _part((3, slice(32, 64)), torch.zeros_like)), ALL),
    Fault(
        "nibbles in the other order",
        ("permuted",),
        each(DOWN, _by_group(lambda w: w.view(*w.shape[:2], 2, 16).mT.reshape(w.shape))),
        ALL,
    ),
    Fault("signs lost", ("codes",), each(DOWN, torch.abs), ALL),
    Fault("noise of 0.4", ("differs",), each(DOWN, lambda W: W + 0.4 * W.std() * torch.randn_like(W)), ALL),
    Fault(
        "rope_theta",
        ("setting",),
        _setting(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        ("llama", "qwen2"),
    ),
    Fault(
        "rotary scaling",
        ("setting",),
        _setting(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
        ("llama", "qwen2"),
    ),
    Fault("eps", ("setting",), _setting(rms_norm_eps=1e-2), ("llama", "qwen2", "gemma3_text", "mixtral")),
    Fault("activation", ("setting",), _setting(hidden_act="gelu"), ("llama", "qwen2", "mixtral")),
    Fault("scale of attention", ("setting",), _setting(query_pre_attn_scalar=64), ("gemma3_text",)),
    Fault("window", ("setting",), _setting(sliding_window=4), ("gemma3_text",)),
    Fault("experts a token", ("setting",), _setting(num_experts_per_tok=1), ("mixtral",)),
)


def planted(model: PreTrainedModel, fault: Fault) -> tuple[PreTrainedModel, list[str]]:
    """A copy of the model with the fault, and the tensors that it touched; a changed setting is built anew."""
    made = copy.deepcopy(model)
    touched = fault.plant(made)
    if not touched:
        built = type(made)._from_config(made.config).eval()
        built.load_state_dict(made.state_dict())
        made = built
    return made, touched


def rounded(model: PreTrainedModel, kind: str = "Q4_0") -> PreTrainedModel:
    """A copy with every matrix in blocks of this type, in Q8_0 or 16 bits where rows are not whole blocks."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim < 2:
                continue
            values = parameter.reshape(-1, parameter.shape[-1]).numpy()
            best = next(k for k in (Kind[kind], Kind.Q8_0, Kind.F16) if fits(k, values.shape[1]))
            parameter.copy_(torch.from_numpy(dequantised(quantised(values, best), best).reshape(parameter.shape)))
    return made


def stored(model: PreTrainedModel, storage: str) -> tuple[str, lp.models.Decoder]:
    """The model in a file of 4 bits, loaded from there; plain safetensors if the storage cannot hold it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        tokenizer = byte_tokenizer()
        try:
            if storage == "GGUF":
                write_gguf(model, tokenizer, path / "m.gguf", "q4_0")
                return storage, lp.load(str(path / "m.gguf"))
            if storage == "packed":
                made = lp.compress(model, method="rtn", bits=4, group_size=32, symmetric=True)
                write_packed(model, made, tokenizer, path / "m", "tiny")
                return storage, lp.load(str(path / "m"))
        except (LyapunovPruneError, lp.CheckFailed, RuntimeError):  # a family, a setting, or NaN
            pass
        return "safetensors", _plain(rounded(model), path / "plain")


def _plain(model: PreTrainedModel, path: Path) -> lp.models.Decoder:
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return lp.load(str(path))


def trained(model: PreTrainedModel, some: str = "", steps: int = 20, rate: float = 1e-3) -> PreTrainedModel:
    """A copy that learnt a little of random text, in the parameters whose names match."""
    made = copy.deepcopy(model).train()
    learning = [p for name, p in made.named_parameters() if re.search(some, name)]
    optimiser = torch.optim.AdamW(learning, lr=rate)
    ids = torch.randint(3, model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.enable_grad():
        for _ in range(steps):
            made(ids, labels=ids).loss.backward()
            optimiser.step()
            made.zero_grad()
    return made.eval()


def with_adapters(
    model: PreTrainedModel, size: float = 0.05, names: Sequence[str] = ("q_proj", "v_proj")
) -> PreTrainedModel:
    """A copy with a merged low-rank change of this relative size in matrices of these names."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for _, W in named(made, "|".join(names)).items():
            change = torch.randn(*W.shape[:-1], 4) @ torch.randn(4, W.shape[-1]) if W.ndim > 1 else torch.zeros_like(W)
            W.add_(size * W.norm() * change / change.norm().clamp_min(1e-9))
    return made


def averaged(model: PreTrainedModel, others: Sequence[PreTrainedModel]) -> PreTrainedModel:
    """The mean of the weights, as a linear merge."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.stack([m.get_parameter(name) for m in (model, *others)]).mean(0))
    return made
