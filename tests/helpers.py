"""What several test files use: tiny random decoders of every family, a tokenizer, small references."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax, rel_entr, softmax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.compression.factors import with_factors
from lyapunov_prune.data import ChoiceItem, ImageBatch
from lyapunov_prune.forward.branches import Branch, find_branches, matrix_children
from lyapunov_prune.healing import state as training_state
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.rounds import Round, Stretch
from lyapunov_prune.mending.report import Gap
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.projections import find_projections
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.predictions.spaces import HIDDEN, PROBABILITIES
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.profiles.propagation import Energies
from lyapunov_prune.pruning.compact import Cuts, make_compact
from lyapunov_prune.pruning.on_disk import prune_on_disk
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.ranking.oracle import Step
from lyapunov_prune.ranking.tried import Final, Tried

LAYERS = 6

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_SLIDING = {"sliding_window": 8}

# Every kind of layer a family mixes, and its switches.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "llama": ("llama", {}),
    "mistral": ("mistral", _SLIDING),
    "qwen2": ("qwen2", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 3}),
    "qwen3": ("qwen3", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 2}),
    "gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3}),
    "phi3": ("phi3", _SLIDING),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


def make_tiny(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of the family, float32, with weights large enough for every layer to matter."""
    model_type, extra = TINY[name]
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **extra, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    return with_large_weights(model)


def make_small(name: str, **changes: Any) -> PreTrainedModel:
    """A compact model of the family: no attention in layers 0 and 4, one matrix for a block, the rest two factors."""
    model = make_tiny(name, **changes)
    W = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 4
    cut = make_compact(model, Cuts(attention=(0, 4), merged={1: (W, torch.ones(32)), 4: (W.T, None)}))
    done = compress(cut, method="svd", sparsity=0.4)
    return with_factors(done.model, done.report.ranks).eval()


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder


def with_large_weights(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


IMAGE_MODELS = {"vit": transformers.ViTForImageClassification, "deit": transformers.DeiTForImageClassification}


def make_classifier(model_type: str) -> PreTrainedModel:
    """A random ViT or DeiT of four layers that tells five classes of 8 × 8 images. Every layer matters."""
    kind = IMAGE_MODELS[model_type]
    small = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    images = {"num_hidden_layers": 4, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 5}
    torch.manual_seed(0)
    return with_large_weights(kind(kind.config_class(**small, **images)).eval())


def digits(n: int = 6, *, channels: int = 1, size: int = 8, seed: int = 0) -> ImageBatch:
    """Random images of 8 bits, scaled as a processor does, of five classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, channels, size, size), generator=generator) / 255
    return ImageBatch((pixels - 0.5) / 0.5, torch.arange(n) % 5, "digits", "all")


# A byte-level vocabulary with one merge: every text has a token sequence, nothing is unknown.
VOCABULARY = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]


def make_tokenizer(adds_bos: bool = False, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of 260 tokens, mostly one a byte."""
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[("t", "h")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = special or {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


def wrong_layer_idx(model: PreTrainedModel) -> None:
    find_structure(model).layers[1].self_attn.layer_idx = 3


def limit_file_size(size: int) -> None:
    """As on a full disk: a file may not grow beyond `size`, and the signal that says so is ignored."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


WEIGHTS = "model.safetensors"


def write_gguf(model: PreTrainedModel, path: Path, leave_out: str = "", *, packed: bool = False) -> Path:
    """A Llama and its vocabulary as a GGUF file; `packed`: Q8_0 where a row is a whole number of its blocks."""
    writer, config = gguf.GGUFWriter(path, "llama"), model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != leave_out:
            values, kind = tensor.numpy(), gguf.GGMLQuantizationType.Q8_0
            blocks = packed and tensor.ndim == 2 and tensor.shape[1] % 32 == 0
            writer.add_tensor(
                names.get_name(name, try_suffixes=(".weight",)),
                gguf.quants.quantize(values, kind) if blocks else values,
                raw_dtype=kind if blocks else None,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(folder: Path, model: PreTrainedModel) -> list[Path]:
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    return shards


def cut(folder: Path, to: int) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:to])


def corrupt_header(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[8:60] = b"x" * 52
    (folder / WEIGHTS).write_bytes(content)


def change_weight(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights[name]
    save_file(weights | ({} if tensor is None else {name: tensor}), folder / WEIGHTS, {"format": "pt"})


def pickle_only(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def missing_shard(folder: Path) -> None:
    shard(folder, load(folder).model)[1].unlink()


def truncated_shard(folder: Path) -> None:
    last = shard(folder, load(folder).model)[-1]
    last.write_bytes(last.read_bytes()[:-10])


UP = "model.layers.3.mlp.up_proj.weight"

BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: cut(f, -1000), r"model\.safetensors is truncated"),
    "header cut": (lambda f: cut(f, 20), r"model\.safetensors is truncated"),
    "empty file": (lambda f: cut(f, 0), r"model\.safetensors is truncated"),
    "corrupt": (corrupt_header, r"model\.safetensors is truncated"),
    "pickle only": (pickle_only, r"only pickled weights \(pytorch_model\.bin\)"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no safetensors weights"),
    "missing shard": (missing_shard, r"cannot load .*model-00002-of-"),
    "truncated shard": (truncated_shard, r"model-0000.* is truncated"),
    "missing key": (lambda f: change_weight(f, UP, None), rf"lacks 1 weights .*{UP}"),
    "wrong shape": (lambda f: change_weight(f, UP, torch.zeros(3, 3)), rf"in another shape \({UP}\)"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "cut config": (lambda f: (f / "config.json").write_text("{"), "cannot load .*config"),
    "unknown type": (
        lambda f: edit_json(f / "config.json", model_type="nn"),
        "is a nn",
    ),
    "no tokenizer": (
        lambda f: [p.unlink() for p in f.glob("token*")],
        "holds no tokenizer",
    ),
    "settings of a tokenizer alone": (
        lambda f: (f / "tokenizer.json").unlink(),
        "holds no tokenizer",
    ),
    "cut tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "cannot load the tokenizer"),
}


def bert() -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )


def linked(folder: Path) -> None:
    """Move every file elsewhere, under the name of a hash, and leave a link."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:040}")
        file.symlink_to(f"../blobs/{number:040}")


def states_of(model: PreTrainedModel, ids: torch.Tensor, moved: torch.Tensor | None = None) -> list[torch.Tensor]:
    """`h_0 … h_L` by wrapping the layers' forward methods: no hooks, no batching of clean and perturbed."""
    layers = find_structure(model).layers
    states: list[torch.Tensor] = []
    originals = [layer.forward for layer in layers]

    def wrap(index: int) -> Any:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if index == 0:
                hidden_states = hidden_states + (0 if moved is None else moved)
                states.append(hidden_states)
            output = originals[index](hidden_states, *args, **kwargs)
            states.append(output if isinstance(output, torch.Tensor) else output[0])
            return output

        return forward

    for index, layer in enumerate(layers):
        layer.forward = wrap(index)
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        for layer in layers:
            del layer.forward
    return states


def computed(model: PreTrainedModel) -> Counter[int]:
    """How often each layer really computes from now on: calls of its first matrix."""
    calls: Counter[int] = Counter()
    for index, layer in enumerate(find_structure(model).layers):
        inner = next(m for m in layer.modules() if getattr(m, "weight", None) is not None and m.weight.ndim == 2)
        inner.register_forward_pre_hook(lambda module, args, index=index: calls.update([index]))
    return calls


def leave(model: PreTrainedModel, writer: int, reader: int, *, taken: bool) -> None:
    """Layer `reader` adds what layer `writer` left on itself, and takes it away if `taken`."""
    layers: Any = find_structure(model).layers

    def write(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        layers[writer].left = output.clone()

    def read(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        left = layers[writer].left
        if taken:
            del layers[writer].left
        return output + left

    layers[writer].mlp.register_forward_hook(write)
    layers[reader].mlp.register_forward_hook(read)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


RHO = (2.0, 0.5, 1.5, 0.25, 1.0, 3.0)


def profile_of(model: PreTrainedModel, rho: Sequence[float] = RHO) -> ContractionProfile:
    """A profile of the model with factors of our choice."""
    measured = measure_contraction(model, torch.ones(1, 4, dtype=torch.int64), seeds=[0])
    energies = np.cumprod([1e-4, *rho])
    return with_energies(measured, energies)


def with_energies(profile: ContractionProfile, energies: np.ndarray) -> ContractionProfile:
    return dataclasses.replace(profile, energies={"energy": energies, "token": energies})


def words_of(svg: str) -> list[str]:
    return [text.strip() for text in ElementTree.fromstring(svg).itertext() if text.strip()]


def inputs_of(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What enters every matrix in one whole forward: tokens × n, float64."""
    found: dict[str, list[torch.Tensor]] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: found.setdefault(name, []).append(args[0].detach().double().flatten(0, -2))
        )
        for name in {p.module for p in find_projections(model)}
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def disk_full(*args: object, **kwargs: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Families with other orders of norms and branches: two layers each, found with no word about them in the package.
OTHERS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "phi": ({}, [("input_layernorm", "self_attn"), ("input_layernorm", "mlp")]),
    "cohere": ({}, [("input_layernorm", "self_attn"), ("input_layernorm", "mlp")]),
    "olmo2": ({}, [("self_attn", "post_attention_layernorm"), ("mlp", "post_feedforward_layernorm")]),
    "glm4": ({}, [("input_layernorm", "post_self_attn_layernorm"), ("post_attention_layernorm", "post_mlp_layernorm")]),
    "biogpt": ({}, [("self_attn_layer_norm", "self_attn"), ("final_layer_norm", "fc2")]),
    "lfm2": (
        {"layer_types": ["full_attention", "conv"], "block_ff_dim": 48},
        [("operator_norm", "self_attn"), ("ffn_norm", "feed_forward")],
    ),
}

PARALLEL = {"gpt_neox", "phi", "cohere"}


def make_other(model_type: str) -> PreTrainedModel:
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        **OTHERS[model_type][0],
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def branches_of(model: PreTrainedModel, ids: torch.Tensor) -> list[tuple[tuple[Branch, ...], torch.Tensor]]:
    """For each layer its branches and what it returned."""
    structure = find_structure(model)
    matrices = matrix_children(model, structure)
    found: list[tuple[tuple[Branch, ...], torch.Tensor]] = []

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        branches = find_branches(layer, args, kwargs, matrices[len(found)])
        found.append((branches, output if isinstance(output, torch.Tensor) else output[0]))

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in structure.layers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def other_head(model_type: str, **extra: Any) -> PreTrainedModel:
    """A family that does more to its logits than multiply by a matrix."""
    config = AutoConfig.for_model(model_type, **SMALL, **extra)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=0.3)
    return model


def turned(v: np.ndarray, w: np.ndarray) -> np.ndarray:
    return 1 - (v * w).sum(-1) / np.linalg.norm(v, axis=-1) / np.linalg.norm(w, axis=-1)


def directions_by_definition(v: np.ndarray, delta: np.ndarray) -> dict[str, np.ndarray]:
    size = np.linalg.norm(v, axis=-1, keepdims=True)
    along = (v * delta).sum(-1, keepdims=True) * v / size**2
    across = np.linalg.norm(delta - along, axis=-1) / size[..., 0]
    found = (turned(v, v + delta), across**2 / 2, np.linalg.norm(along, axis=-1) / size[..., 0], across)
    return dict(zip(HIDDEN, found, strict=True))


def predictions_by_definition(z: np.ndarray, dz: np.ndarray, T: float) -> dict[str, np.ndarray]:
    p, q, d = softmax(z / T, axis=-1), softmax((z + dz) / T, axis=-1), dz / T
    r = p**2 / (p**2).sum(-1, keepdims=True)

    def variance(w: np.ndarray) -> np.ndarray:
        return (w * (d - (w * d).sum(-1, keepdims=True)) ** 2).sum(-1)

    c = np.abs(d - (p * d).sum(-1, keepdims=True)).max(-1)
    kl, reverse = rel_entr(p, q).sum(-1), rel_entr(q, p).sum(-1)
    c_r = np.abs(d - (r * d).sum(-1, keepdims=True)).max(-1)
    found = (turned(p, q), variance(r) / 2, variance(p) / 2, kl, reverse, np.ptp(d, axis=-1), c, c_r, d.var(-1))
    return dict(zip(PROBABILITIES, found, strict=True))


def measures_by_definition(z: np.ndarray, z2: np.ndarray, T: float = 1.0) -> np.ndarray:
    """The measures of `SkipDivergence` in its order, one behind the other, of every row."""
    found = predictions_by_definition(z, z2 - z, T) | {"flipped": z.argmax(-1) != z2.argmax(-1)}
    return np.array([found[name] for name in ("kl_estimate", "kl", "reverse_kl", "flipped", "probability_estimate")])


def bits(model: PreTrainedModel) -> dict[str, tuple[int, torch.Tensor]]:
    """Every parameter: which tensor it is, and a copy of its numbers."""
    return {name: (id(p), p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}


def assert_same(model: PreTrainedModel, before: dict[str, tuple[int, torch.Tensor]]) -> None:
    after = bits(model)
    assert after.keys() == before.keys()
    for name, (identity, numbers) in before.items():
        assert after[name][0] == identity, name
        assert torch.equal(after[name][1], numbers), name


def equal(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    """Whether both hold the same tensors under the same names."""
    return a.state_dict().keys() == b.state_dict().keys() and all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def interrupted_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """From now on a run is interrupted after so many more steps, the state of each of which is kept."""
    left, take_step = [steps], Distillation.take_step

    def interrupt(self: Distillation, inputs: torch.Tensor, rate: float) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        take_step(self, inputs, rate)

    patch.setattr(Distillation, "take_step", interrupt)
    patch.setattr(training_state, "SECONDS", 0.0)
    patch.setattr(training_state, "_SHARE", math.inf)


def moe(model_type: str) -> PreTrainedModel:
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


ITEMS = (
    ChoiceItem("Which melts?", ("ice", "stone", "the thick ether"), 0),
    ChoiceItem("Two and two are\n", ("four", "5", "café", "zzzzzzzzzzzz"), 2),
    ChoiceItem("a", ("bc", "bd"), 1),  # one first token
    ChoiceItem("This and that", ("th", "ht"), 0),
)


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    return copy.deepcopy(model).double()(torch.tensor([tokens])).logits[0].numpy()


def by_definition(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, item: ChoiceItem) -> list[float]:
    """Of every choice on its own. The tokenizer is one of bytes: the query's tokens are the query's."""
    joint = "" if item.query.endswith("\n") else " "
    query, found = len(tokenizer(item.query)["input_ids"]), []
    for choice in item.choices:
        ids = tokenizer(item.query + joint + choice)["input_ids"]
        log_p = log_softmax(logits_of(model, ids), -1)
        found.append(sum(log_p[t - 1, ids[t]] for t in range(query, len(ids))))
    return found


def captured(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Norms by module, from one forward of all windows together, squares summed by numpy in float64."""
    seen: dict[str, np.ndarray] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen[name] = np.sqrt((args[0].double().numpy().reshape(-1, args[0].shape[-1]) ** 2).sum(0))

        return keep

    names = {p.module for p in find_projections(model)}
    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return seen


def example(kind: Any, floats: Iterator[float]) -> Any:
    """A value of the annotated type, with NaN and infinities among its floats."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if kind == (bool | None) else example(args[0], floats)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        values = {field.name: example(hints[field.name], floats) for field in dataclasses.fields(kind)}
        # A plan does not drop parts of layers that it removes.
        values |= {name: (2, 3) for name in values if name.startswith("drop_")}
        values |= sound(kind.__name__, values, floats)
        return typing.cast(type, kind)(**values)
    if origin is typing.Literal:
        return args[-1]
    if origin is tuple:
        return (0, 1) if args[0] is int else tuple(example(args[0], floats) for _ in range(2))
    if origin is dict:
        return {"a": example(args[1], floats), "b": example(args[1], floats)}
    if kind is np.ndarray:
        return np.array([[next(floats) for _ in range(2)] for _ in range(3)])
    return {int: 5, float: next(floats), str: "ρ “x”\n", bool: True, Any: [8.5, "nan", {"c": None}]}[kind]


def sound(name: str, values: dict[str, Any], floats: Iterator[float]) -> dict[str, Any]:
    """Fields of a result that is checked when it is made, of five layers: no NaN where a number must be."""

    def some(*shape: int, finite: bool = True, most: float = np.inf) -> np.ndarray:
        found = np.minimum(np.abs([next(floats) for _ in range(math.prod(shape))]), most).reshape(shape)
        return np.nan_to_num(found, nan=0.25, posinf=2.0) if finite else found

    def loose(*shape: int) -> np.ndarray:
        return some(*shape, finite=False)

    if name == "ContractionProfile":
        lengths = {"error_growth": 5, "state_growth": 5, "norm_growth": 3, "linearity": 5}
        shares = {field: some(6, finite=False, most=1) for field in ("sink_state_share", "sink_error_share")}
        energies, intervals = (
            {p: make() for p in ("energy", "token")} for make in (lambda: some(6), lambda: loose(5, 2))
        )
        made = {field: loose(length) for field, length in lengths.items()}
        seeds = len(values["seeds"])
        windows = Energies(some(6, 3), some(6, seeds, 3), some(6, seeds, 3))
        kept = {"pooling": "token", "energies": energies, "intervals": intervals, "floor": some(6), "windows": windows}
        return {**kept, **made, **shares}
    if name == "InfluenceProfile":
        return {"influence": some(5), "spread": loose(5), "change": some(5), "windows": some(5, 3)}
    if name == "LayerProfile":
        return {"influence": dataclasses.replace(values["influence"], measured_on=values["contraction"].measured_on)}
    if name == "SublayerInfluence":
        windows = {"windows": {field: loose(5, 3) for field in ("attention", "mlp")}}
        return {field: loose(5) for field in ("attention", "mlp", "attention_spread", "mlp_spread")} | windows
    if name == "SublayerGrowth":
        return {field: loose(5, 2) for field in ("error_growth", "state_growth", "token_rho")}
    if name == "AmplificationDrift":
        scores = {field: {p: loose(5) for p in ("energy", "token")} for field in ("rho", "amplification")}
        return {"drift": loose(2), **scores}
    if name in ("SkipDivergence", "SublayerDivergence"):
        return {field: loose(5) for field in ("variance", "kl", "reverse_kl", "variance_r")} | {
            "flipped": some(5, most=1)
        }
    if name == "GreedyRemoval":
        return {"dense": some(3), "steps": tuple(Step(layer, some(3), next(floats), 2) for layer in (3, 1))}
    if name == "BestRemoval":
        tried = tuple(Tried("ρ", (0, k), some(3), k == 2, next(floats)) for k in (1, 2))
        final = Final((0, 2), loose(3), some(4), loose(4), next(floats))
        return {"tried": tried, "chosen": 1, "dense": some(3), "finals": (final,), "other_dense": some(4)}
    if name == "Healing":
        run = Stretch("best", False, 2e-3, 6), Stretch("here", False, 2e-3, 6, 6)
        stretches = (Stretch("start", True, 1e-3, 4), *run)
        rounds = tuple(Round(stretch, loose(3)) for stretch in stretches)
        return {"rounds": rounds, "losses": loose(16), "judged": some(3)}
    if name == "MendReport":
        gap = Gap(1, 3, "mlp", ("none", "full"), np.array([0.0, 0.1]), loose(2), 1)
        return {"gaps": (gap,)}
    if name == "LayerRanking":
        largest = np.finfo(np.float64).max  # a layer may have no score, none an infinite one
        return {"scores": some(5, finite=False, most=largest), "picked": some(5, 5, most=1)}
    if name == "PruningPlan":
        told = {"picked": some(5, most=1), "tied": (1, 3)}
        return {"scores": loose(5), "drop_activation": (4,), "reduction": "affine", **told}
    if name == "Allocation":
        amount = some(2, most=1)
        kept = {"names": ("a", "b"), "sizes": (5, 5), "amount": amount, "budget": float(amount.mean())}
        return {"unit": "sparsity", "pooling": "token", **kept}
    if name == "JointMap":
        fitted = {"scores": some(4), "degree": 1, "coefficients": some(3)}
        return {"removed": some(4, 2, most=1), "errors": {1: next(floats), 2: 0.5}, "excluded": {3: "ρ"}, **fitted}
    if name == "Importance":
        return {"attention": some(5), "activation": some(5)}
    if name == "Points":
        scored = {"pairs": np.array([[0, 3], [2, 1]]), "seeds": np.array([0, 1]), "scores": some(2)}
        return {**scored, "items": loose(2, 3), "losses": some(2, 2), "seconds": some(2)}
    if name == "JointDecision":
        spreads = {field: (next(floats), 5) for field in ("over_seeds", "residual")}
        pairs = np.array([[0, 3], [1, 2], [2, 1]])
        return {"pairs": pairs, **{field: some(3) for field in ("predicted", "low", "high")}, **spreads}
    return {}


REMOVE = (1, 4)


def tensors(folder: Path) -> dict[str, bytes]:
    """Dtype, shape and bytes of every tensor, read by safetensors itself."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 - safe_open is no dict
                value = opened.get_tensor(name)
                found[name] = f"{value.dtype}{value.shape}".encode() + value.tobytes()
    return found


def on_disk(source: Path, target: Path, remove: tuple[int, ...] = REMOVE, **options: Any) -> Provenance:
    outline = read_outline(source, source)
    return prune_on_disk(outline, PruningPlan.given(outline.identity, remove), target, **options)


TEXT = ["--tokens", "128", "--context", "64"]

# Every way of writing a checkpoint of the folder `tiny`, without its output.
WRITERS = [
    ["prune", "tiny", "--layers", "1", *TEXT],
    ["prune", "tiny", "--layers", "1", "--on-disk"],
    ["prune", "tiny", "--layers", "1", "--stream"],
    ["prune", "tiny", "--layers", "1", "--what", "attention", "--format", "compact", *TEXT],
    ["compress", "tiny", "--method", "magnitude", "--sparsity", "0.5"],
    ["compress", "tiny", "--method", "magnitude", "--sparsity", "0.5", "--stream"],
    ["compress", "tiny", "--method", "svd", "--sparsity", "0.5", "--format", "compact"],
    ["compress", "tiny", "--method", "rtn", "--bits", "4", "--symmetric", "--format", "compressed-tensors"],
    ["heal", "tiny", "--teacher", "tiny", "--steps", "1", *TEXT],
]


def writer_id(arguments: list[str]) -> str:
    return " ".join(a for a in arguments if a.isalpha() or a in ("--on-disk", "--stream"))


QUICK = [*TEXT, "--seeds", "1"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    changed: set[str]  # files and folders that came, went or changed


def tree() -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in Path().rglob("*")}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def launched_twice(script: Path) -> subprocess.CompletedProcess[str]:
    """`script` in two processes that know of each other.

    What `accelerate launch` starts for several devices; its --cpu starts one process whatever --num_processes says.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launch, str(script)], env=env, capture_output=True, text=True, timeout=300)
