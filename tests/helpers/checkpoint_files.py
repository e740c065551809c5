"""Checkpoints as files: written, broken, read again."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.tiny_models import VOCABULARY
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.export.copied import prune_on_disk
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.loading import load
from lyapunov_prune.pruning.gate import SKIPPED
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder


def limit_file_size(size: int) -> None:
    """As on a full disk: a file may not grow beyond `size`, and the signal that says so is ignored."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


WEIGHTS = "model.safetensors"


# GGUF's name of an architecture that is not the model type, and the tensors that its files hold transposed.
_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
_TRANSPOSED = {"gpt2": ("attn_qkv", "attn_output", "ffn_up", "ffn_down")}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    leave_out: str = "",
    *,
    packed: bool = False,
    values: Mapping[str, Any] = MappingProxyType({}),
    **split: int,
) -> Path:
    """A model and its vocabulary as a GGUF file; `packed`: Q8_0 where a row is a whole number of its blocks.

    `values` are arrays and numbers for the header, under the architecture's name; `split` as GGUFWriter has it. The
    numbers are written as they are, so that a file of a family whose numbers llama.cpp changes holds another model.
    """
    config = model.config
    name = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name, **split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = config.n_inner if name == "gpt2" else getattr(config, "intermediate_size", None)
    writer.add_feed_forward_length(inner or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1e-5))
    writer.add_layer_norm_eps(getattr(config, "layer_norm_epsilon", 1e-5))
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    for key, value in values.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{name}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for own, tensor in model.state_dict().items():
        if own != leave_out and not (tied and own == "lm_head.weight"):
            called = names.get_name(own, try_suffixes=(".weight", ".bias"))
            turned = called.endswith(".weight") and any(part in called for part in _TRANSPOSED.get(name, ()))
            numbers, kind = (tensor.T if turned else tensor).contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0
            blocks = packed and numbers.ndim == 2 and numbers.shape[1] % 32 == 0
            writer.add_tensor(
                called,
                gguf.quants.quantize(numbers, kind) if blocks else numbers,
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
    "missing shard": (missing_shard, r"names model-00002-of-.*lacks it"),
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


def linked(folder: Path) -> None:
    """Move every file elsewhere, under the name of a hash, and leave a link."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:040}")
        file.symlink_to(f"../blobs/{number:040}")


def disk_full(*args: object, **kwargs: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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


def require_same_files(loaded: Decoder, source: Path, plan: PruningPlan, folder: Path) -> None:
    """Prune `source` on disk and its `loaded` model in memory: the gate compares logits and passes, the files equal."""
    disk, memory = folder / "disk", folder / "memory"
    written = prune_on_disk(read_outline(source, source), plan, disk, stream=True)
    assert written.gate.passed
    assert SKIPPED in {check.name for check in written.gate.checks}
    write_pruned(loaded.model, loaded.tokenizer, plan, memory)
    assert tensors(disk) == tensors(memory)
    configs = [json.loads((place / "config.json").read_text()) for place in (disk, memory)]
    assert configs[0] == configs[1]
