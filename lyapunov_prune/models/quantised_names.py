"""Module names in a checkpoint's quantisation settings, and how they are renumbered when layers are removed.

Methods name modules that they skip or treat differently in their own ways: `ignore` and `targets` of
compressed-tensors, `modules_to_not_convert`, `llm_int8_skip_modules`, keys of `dynamic`. All are strings: names, globs
(`model.layers.0.self_attn*`), or regular expressions (`re:…`; `+:…` and `-:…` of GPTQModel).

A name is renumbered by the path before its number. A pattern is kept, or given new numbers, only if it then matches
exactly the same modules under their new names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.quantised import SETTINGS
from lyapunov_prune.models.weight_files import TensorTarget, stored_path

# Files of several programs that repeat these settings beside the config.
FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json")
_MARKS = ("re:", "+:", "-:")
_PATTERN = re.compile(r"[\[\](){}|\\^$*+?]")
_NUMBERS = re.compile(r"\d+")
_DOT, _SPEC = r"(?:\\\.|\[\.\]|\.)", r"\d+|\((?:\?:)?\d+(?:\|\d+)*\)|\[\d+\]"
_BETWEEN_DOTS = re.compile(rf"({_DOT})({_SPEC})(?={_DOT})")


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers `kept` of a model; `paths` are the names before the layer number, in the model and in its files.

    `modules` are the names of all modules, in both spellings.
    """

    paths: frozenset[str]
    modules: frozenset[str]
    kept: tuple[int, ...]

    @cached_property
    def _new(self) -> dict[int, int]:
        return {old: new for new, old in enumerate(self.kept)}

    @cached_property
    def _others(self) -> frozenset[str]:
        """The paths of other module lists: a vision tower's layers, heads that predict more tokens."""
        found = {
            ".".join(parts[:place])
            for parts in (module.split(".") for module in self.modules if self.number(module) is None)
            for place, part in enumerate(parts)
            if part.isdecimal()
        }
        return frozenset(found - self.paths)

    def number(self, name: str) -> int | None:
        """The layer of the module or tensor `name`; None outside the layers."""
        for path in self.paths:
            number = name[len(path) + 1 :].partition(".")[0]
            if name.startswith(f"{path}.") and number.isdecimal():
                return int(number)
        return None

    def at(self, name: str, number: int) -> str:
        """The name that `name`, of some layer, has in layer `number`."""
        path = next(path for path in self.paths if name.startswith(f"{path}."))
        _, dot, rest = name[len(path) + 1 :].partition(".")
        return f"{path}.{number}{dot}{rest}"

    def renamed(self, name: str) -> str | None:
        """The new name of the module or tensor `name`; None if it is removed."""
        old = self.number(name)
        if old is None:
            return name
        return self.at(name, self._new[old]) if old in self._new else None

    def follow(self, settings: Any) -> Any:
        """`settings` with every name in them renumbered, or dropped with its layer.

        Raises LyapunovPruneError for a name or pattern that cannot be renumbered.
        """
        if isinstance(settings, dict):
            named = [(self._followed(key) if isinstance(key, str) else key, told) for key, told in settings.items()]
            followed = [(key, told, self.follow(told)) for key, told in named if key is not None]
            return {key: new for key, told, new in followed if new is not None or told is None}
        if isinstance(settings, list | tuple):
            return [new for told in settings if (new := self.follow(told)) is not None or told is None]
        return self._followed(settings) if isinstance(settings, str) else settings

    def by_layer(self, settings: Any) -> dict[int | None, set[str]]:
        """The plain names in `settings` without layer numbers, by layer; names outside the layers under None."""
        found: dict[int | None, set[str]] = {}
        for name in filter(_is_plain, _strings(settings)):
            place = self._place(name)
            before, number, rest = (name, None, "") if place is None else place
            found.setdefault(number, set()).add(f"{before}.*{rest}" if place else name)
        return found

    def _followed(self, name: str) -> str | None:
        if not _is_plain(name):
            return self._pattern(name)
        place = self._place(name)
        if place is None:
            return name
        before, number, rest = place
        return f"{before}.{self._new[number]}{rest}" if number in self._new else None

    def _place(self, name: str) -> tuple[str, int, str] | None:
        """A plain name split at its layer number; it may begin inside the path (`layers.3.mlp`). None without one."""
        parts = name.split(".")
        for place, part in enumerate(parts):
            before = ".".join(parts[:place])
            if part.isdecimal() and self._is_ours(before, name):
                return before, int(part), "".join(f".{part}" for part in parts[place + 1 :])
        return None

    def _is_ours(self, before: str, name: str) -> bool:
        """Whether the number after `before` in `name` is a layer's; raises LyapunovPruneError if that is unclear."""
        last = before.rpartition(".")[2]
        if before in self.paths or not any(_ends(path, last) for path in self.paths):
            return before in self.paths
        rivals = {path for path in self._others if _ends(path, last)}
        if not rivals or before in rivals:
            return not rivals
        ours, theirs, parts = _parts(self.paths), _parts(rivals), _parts({before})
        mine = bool(parts & (ours - theirs))
        if mine == bool(parts & (theirs - ours)):
            raise self._refused(name)
        return mine

    def _pattern(self, name: str) -> str | None:
        try:
            matched = {module for module in self.modules if matches(name, module)}
        except re.error:
            matched = set()
        if not matched:  # it matches no module of this model
            return self._renumbered(name) if self._numbered.search(name) else name
        wanted = {new: module in matched for module in self.modules if (new := self.renamed(module)) is not None}
        if not any(wanted.values()):
            return None
        for tried in (name, self._renumbered(name), self._renumbered(name, _BETWEEN_DOTS)):
            if tried is not None and all(matches(tried, module) == right for module, right in wanted.items()):
                return tried
        raise self._refused(name)

    @cached_property
    def _numbered(self) -> re.Pattern[str]:
        """The number of a layer in a pattern: `layers\\.3`, `layers.(1|2)`, `layers\\.[01]`."""
        lists = "|".join(sorted({re.escape(path.rpartition(".")[2]) for path in self.paths}))
        return re.compile(rf"((?<![A-Za-z0-9])(?:{lists}){_DOT})({_SPEC})")

    def _renumbered(self, name: str, numbered: re.Pattern[str] | None = None) -> str | None:
        """`name` with new layer numbers; None if it has no number, or all numbers at one place are removed."""
        numbered = self._numbered if numbered is None else numbered
        places = numbered.findall(name)
        if not places or any(not self._follow_numbers(old) for _, old in places):
            return None
        return numbered.sub(lambda found: found[1] + self._follow_numbers(found[2]), name)

    def _follow_numbers(self, old: str) -> str:
        single = old.startswith("[")
        numbers = list(old[1:-1]) if single else _NUMBERS.findall(old)
        new = [str(self._new[int(each)]) for each in numbers if int(each) in self._new]
        if not new:
            return ""
        if single:
            return f"[{''.join(new)}]"
        return new[0] if old.isdecimal() else f"{'(?:' if old.startswith('(?:') else '('}{'|'.join(new)})"

    def _refused(self, name: str) -> LyapunovPruneError:
        return LyapunovPruneError(
            f"the quantisation config names layers by number in {name}, which cannot be renumbered safely; write the "
            "names of the modules there, one by one"
        )


def layers_in(
    decoder: Decoder, targets: Mapping[str, TensorTarget], keys: Iterable[str], kept: tuple[int, ...]
) -> Layers:
    """The layers `kept` of `decoder`, whose files hold the tensors `keys`; `targets` is from `targets_of`."""
    modules = {name for name, _ in decoder.model.named_modules() if name}
    for key in keys:
        parts = key.split(".")[:-1]
        modules.update(".".join(parts[:place]) for place in range(1, len(parts) + 1))
    paths = {decoder.structure.layers_path, stored_path(decoder.structure, targets)}
    return Layers(frozenset(paths), frozenset(modules), kept)


def settings_of(config: PreTrainedConfig) -> list[tuple[PreTrainedConfig, str, dict[str, Any]]]:
    """The quantisation settings of `config` and its text config, each as (config, attribute name, settings)."""
    parts = {id(part): part for part in (config, config.get_text_config(decoder=True))}.values()
    found = [(part, name, getattr(part, name, None)) for part in parts for name in SETTINGS]
    return [(part, name, settings) for part, name, settings in found if isinstance(settings, dict)]


def follow_layers(config: PreTrainedConfig, layers: Layers) -> None:
    """Renumber the module names in the quantisation settings of `config`, in place."""
    for part, name, settings in settings_of(config):
        setattr(part, name, layers.follow(settings))


def matches(pattern: str, module: str) -> bool:
    """Whether the name or pattern of a quantisation config matches `module`, as the methods' libraries read it."""
    if pattern.startswith(_MARKS):
        return re.match(pattern[3:] if pattern.startswith("re:") else pattern[2:], module) is not None
    if fnmatchcase(module, pattern) or _ends(module, pattern):
        return True
    try:  # as in transformers: from the start to the end of a part
        return re.match(rf"(?:{pattern})(?=\.|$)", module) is not None
    except re.error:
        return False


def _is_plain(name: str) -> bool:
    return not name.startswith(_MARKS) and not _PATTERN.search(name)


def _strings(settings: Any) -> Iterator[str]:
    """Every string in `settings`, including keys."""
    if isinstance(settings, dict):
        yield from map(str, settings)
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from _strings(value)
    elif isinstance(settings, str):
        yield settings


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")


def _parts(paths: Iterable[str]) -> set[str]:
    return {part for path in paths for part in path.split(".")}
