"""The tensors and settings of a checkpoint as they lie on disk, read so that a broken one can be looked at.

Nothing is loaded by transformers here: a file that it refuses is what is asked about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from lyapunov_prune.checkpoints.tensor_files import read_header as read_safetensors
from lyapunov_prune.diagnosis.finding import NUMBER, Finding, unnumbered
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.folder import ADAPTER_CONFIG
from lyapunov_prune.models.gguf import gguf_file
from lyapunov_prune.models.gguf_header import Header, read_header
from lyapunov_prune.models.loading import checkpoint_folder
from lyapunov_prune.models.weight_files import INDEX, SINGLE
from lyapunov_prune.results.files import parsed

_BITS = re.compile(r"\d+")  # the first number in the name of a type: F8_E4M3 has 8
FETCH = "fetch the file again, and compare its size and checksum with those of its source"


@dataclass(frozen=True)
class FileTensor:
    """A tensor: `size` bytes from `start` of `file`, row-major `shape`, `dtype` as the file has it (`BF16`, `Q4_K`)."""

    name: str
    file: Path
    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def role(self) -> str:
        """What its siblings in other layers and experts have in common."""
        return unnumbered(self.name)

    @property
    def layer(self) -> int | None:
        """The first number in its name; None outside the layers."""
        found = NUMBER.search(self.name)
        return int(found[0]) if found else None


@dataclass(frozen=True, eq=False)
class Stored:
    """A checkpoint: a `folder` with the content of its config.json, or the `header` of a GGUF file.

    `places` lists every tensor of every file, by name; a name may be in several files. `faults` were met on opening.
    """

    name: str
    places: Mapping[str, tuple[FileTensor, ...]]
    faults: tuple[Finding, ...] = ()
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    header: Header | None = None

    @cached_property
    def parts(self) -> dict[str, FileTensor]:
        """Every tensor whose bytes are all there, by name; where a name is in several files, that in the last."""
        ends = {file: file.stat().st_size for file in {part.file for parts in self.places.values() for part in parts}}
        whole = {name: parts[-1] for name, parts in self.places.items()}
        return {name: part for name, part in whole.items() if part.start + part.size <= ends[part.file]}

    def setting(self, *names: str) -> Any:
        """The first of these settings that the config or its text config has; for a GGUF file, header keys."""
        if self.header is not None:
            keys = (f"{self.header.architecture}.{name}" for name in names)
            return next((self.header.read(key) for key in keys if key in self.header.values), None)
        inner = self.config.get("text_config")
        places = (inner, self.config) if isinstance(inner, dict) else (self.config,)
        return next((place[name] for name in names for place in places if place.get(name) is not None), None)

    def json(self, file: str) -> dict[str, Any]:
        """The content of a JSON file in the folder; {} if there is none or it is no object."""
        with suppress(OSError, ValueError, RecursionError):
            found = parsed((self.folder / file).read_text(encoding="utf-8")) if self.folder is not None else {}
            return found if isinstance(found, dict) else {}
        return {}


def open_stored(name: str) -> Stored:
    """Look at the checkpoint `name`: a folder, a hub id, a GGUF file, or the built-in model.

    Raises LyapunovPruneError if there is none.
    """
    file = gguf_file(name)
    return _open_folder(name, checkpoint_folder(name)) if file is None else _open_gguf(name, file)


def _open_gguf(name: str, path: Path) -> Stored:
    try:
        header = read_header(path, whole=False)
    except LyapunovPruneError as error:
        if not path.is_file():
            raise
        return Stored(name, {}, (Finding("header", (), f"{error.message.partition(';')[0]}.", "certain", "", FETCH),))
    parts = [
        FileTensor(t.name, t.file, t.start, t.size, t.quantisation, tuple(reversed(t.dims))) for t in header.tensors
    ]
    return Stored(name, {part.name: (part,) for part in parts}, tuple(_cut(parts)), header=header)


def _open_folder(name: str, folder: Path) -> Stored:
    faults: list[Finding] = []
    config: Any = {}
    try:
        config = parsed((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        config = {}
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        if not (folder / ADAPTER_CONFIG).is_file():
            faults.append(Finding("config", (), f"config.json {why}.", "certain", "", "copy the original model's"))
    places: dict[str, list[FileTensor]] = {}
    for file in _files(folder, config):
        try:
            found = read_safetensors(file)
            parts = [FileTensor(t.key, file, t.start, t.size, t.dtype, t.shape) for t in found.values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            said = f"{file.name} has no header of tensors: it is truncated, or no safetensors file."
            faults.append(Finding("header", (), said, "certain", "a download that was cut", FETCH))
            continue
        wrong = [part for part in parts if not _fits(part)]
        for part in wrong:
            said = f"{file.name} gives `{part.name}` a type, shape or size that do not fit each other."
            faults.append(Finding("header", (part.name,), said, "certain", "a header that was edited", FETCH))
        parts = [part for part in parts if part not in wrong]
        faults += _cut(parts)
        for part in parts:
            places.setdefault(part.name, []).append(part)
    if not places and not faults:
        pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
        what = f"only pickled weights ({pickles[0]})" if pickles else "no weights"
        faults.append(
            Finding("missing", (), f"The folder holds {what}.", "certain", "", "convert or fetch safetensors")
        )
    return Stored(name, {key: tuple(parts) for key, parts in places.items()}, tuple(faults), folder, config)


def _fits(part: FileTensor) -> bool:
    """Whether the header of a safetensors file describes a tensor: its type is a word, and its bytes fill its shape."""
    numbers = [part.start, part.size, *part.shape]
    if not isinstance(part.dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):
        return False
    found = _BITS.search(part.dtype)  # none in BOOL
    return part.size == prod(part.shape) * (int(found[0]) if found else 8) // 8


def _files(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """The weight files that loading would read, those that are there."""
    named = config.get("transformers_weights")
    if isinstance(named, str) and named.endswith(".safetensors") and Path(named).name == named:
        return [path for path in [folder / named] if path.is_file()]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    names = index_of(folder).values()
    listed = [folder / each for each in sorted({*names}) if Path(each).name == each and (folder / each).is_file()]
    return listed or sorted(folder.glob("*.safetensors"))


def index_of(folder: Path) -> dict[str, str]:
    """The file of every tensor by the index in `folder`; {} if there is none or it is broken."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items()
        return {str(key): str(file) for key, file in found}
    return {}


def _cut(parts: list[FileTensor]) -> Iterator[Finding]:
    """Tensors that lie beyond the end of their file."""
    ends = {part.file: part.file.stat().st_size for part in parts}
    beyond = tuple(part.name for part in parts if part.start + part.size > ends[part.file])
    if beyond:
        files = ", ".join(sorted({part.file.name for part in parts if part.name in set(beyond)}))
        said = f"{files} ends before {len(beyond)} of its tensors do, the first `{beyond[0]}`."
        yield Finding("truncated", beyond, said, "certain", "a download or a copy that was cut", FETCH)
