"""What a checkpoint is besides its weights: config, tokenizer, and the other files of the folder it was loaded from.

`save_pretrained` writes the config and the tokenizer. What else lies beside the weights (a processor's settings, a
tokenizer's own model, the pooling of an embedding model, the licence) is copied, or named in one line on stderr.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.errors import LyapunovPruneError, printable
from lyapunov_prune.models.adapter_folder import base_of
from lyapunov_prune.models.deci import as_served
from lyapunov_prune.models.folder import ADAPTER_CONFIG
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.left_out import require_whole, without_heads
from lyapunov_prune.models.loading import checkpoint_folder
from lyapunov_prune.models.weight_files import INDEX, weight_files
from lyapunov_prune.progress import warn
from lyapunov_prune.results.files import parsed

MODULES = "modules.json"  # the parts of a sentence-transformers model, each in a folder of its own
_TOKENIZER = (
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
_SETTINGS = (
    "*preprocessor_config.json",
    "processor_config.json",
    "chat_template*",
    MODULES,
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
)
_IN_PARTS = ("*.json", "*.safetensors", "*.txt")
# Of the source alone: its card and pictures of it, and what is written anew.
_ITS_OWN = ("config.json", "generation_config.json", "*.md", "*.html", "*.png", "*.jpg", "*.svg", ".*", INDEX)
_NAMED = 5  # files that the line names


def save_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """`save_pretrained` of both into `folder`, and what else belongs to the checkpoint that `model` was loaded from.

    `state` stands in the place of the model's own tensors; empty, no weights are written. No config that is written
    counts prediction heads, which no model holds (`models.left_out`), and that of a DeciLM says what its layers lack
    (`models.deci`). Raises LyapunovPruneError for a model that was loaded without a part of its checkpoint that nobody
    asked to leave out.
    """
    require_whole(model)
    bare = state is not None and not state  # asked now: saving empties it
    with quiet():
        model.save_pretrained(folder, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    written = json.loads(config.read_text(encoding="utf-8"))
    if written != (right := as_served(without_heads(written))):
        config.write_text(json.dumps(right, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if bare:
        for empty in folder.glob("*.safetensors"):
            empty.unlink()
    _carry(model, tokenizer, folder)


def _carry(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    source = source_folder(model)
    if source is None:
        return
    known: tuple[str, ...] = _SETTINGS
    if tokenizer is not None and Path(tokenizer.name_or_path).resolve() == source.resolve():
        known += _TOKENIZER
    behind = []
    for path, patterns in _beside(source, known, getattr(model.config, "transformers_weights", None)):
        name = path.relative_to(source)
        if (folder / name).exists():
            continue
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns) and _inside(path, source):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        else:
            behind.append(printable(str(name)))
    if behind:
        more = f" and {len(behind) - _NAMED} more" if len(behind) > _NAMED else ""
        warn(f"left behind in {source}, as no known part of a checkpoint: {', '.join(behind[:_NAMED])}{more}")


def source_folder(model: PreTrainedModel) -> Path | None:
    """The folder that `model` was loaded from; None where it is not known, or not on this machine."""
    with suppress(LyapunovPruneError):
        folder = checkpoint_folder(model.config._name_or_path, offline=True)
        return checkpoint_folder(base_of(folder), offline=True) if (folder / ADAPTER_CONFIG).is_file() else folder
    return None


def _beside(source: Path, known: Sequence[str], named: str | None) -> Iterator[tuple[Path, Sequence[str]]]:
    """What lies in `source` beside weights and config, each with the patterns of names that are copied there."""
    weights, parts = {path.name for path in weight_files(source, named)}, _parts(source)
    for path in sorted(source.iterdir()):
        if path.name in parts:
            yield from ((inner, _IN_PARTS) for inner in sorted(path.iterdir()))
        elif path.name not in weights and not any(fnmatch(path.name, p) for p in _ITS_OWN) and not _is_result(path):
            yield path, known


def _parts(source: Path) -> set[str]:
    """The folders beside the weights that hold parts of a sentence-transformers model."""
    try:
        modules: Any = parsed((source / MODULES).read_text(encoding="utf-8"))
        names = {str(module["path"]) for module in modules}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {path.name for path in source.iterdir() if path.is_dir() and path.name in names}


def _inside(path: Path, source: Path) -> bool:
    """Whether a link leads nowhere else: files of the hub's cache are links to the blobs beside its snapshots."""
    home = source.resolve()
    return any(path.resolve().is_relative_to(place) for place in (home, home.parent.parent / "blobs"))


def _is_result(path: Path) -> bool:
    """Whether `path` is a result of this program, which tells of the source and not of what is made of it."""
    with suppress(OSError, ValueError, TypeError):
        return path.suffix == ".json" and "kind" in parsed(path.read_text(encoding="utf-8"))
    return False
