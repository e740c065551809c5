"""Registries of named choices: a row is a name, the name of a file with one class."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar, cast, dataclass_transform, get_type_hints

from lyapunov_prune.arguments import fits, is_finite, words
from lyapunov_prune.errors import LyapunovPruneError, did_you_mean

T = TypeVar("T", bound="Choice")


@dataclass_transform(frozen_default=True)
class Choice(ABC):
    """A named choice. Every subclass becomes a frozen dataclass, whose fields are its options.

    `name` is that of its file, with `-` for `_`. `help` is one line on what it does, without a full stop; `reference`
    is its source. The file of a class imports neither torch nor numpy (see `lazy`), because `--help` reads it.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    reference: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.name = cls.__module__.rpartition(".")[2].replace("_", "-")
        dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        """Raise LyapunovPruneError for an option that does not match its annotation or is not finite."""
        hints = get_type_hints(type(self), include_extras=True)
        for option in self.options():
            value = getattr(self, option)
            if not (fits(value, hints[option]) and is_finite(value)):
                wanted = words(hints[option]) if is_finite(value) else "a finite number"
                raise LyapunovPruneError(f"{option} of {self.name} is {value!r}; give {wanted}")

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]


class Registry(Mapping[str, type[T]], Generic[T]):
    """The classes of `names`, each in the file of `package` of the same name, with `_` for `-`; imported on first use.

    Raises LyapunovPruneError for an unknown name, and for a file that does not define one class.
    """

    def __init__(self, kind: str, package: str, names: Sequence[str]) -> None:
        self._kind, self._package, self._names = kind, package, names

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._names:
            meant = did_you_mean(name, self._names)
            raise LyapunovPruneError(f"unknown {self._kind} {name!r}{meant}; give one of {', '.join(self._names)}")
        file = import_module(f"{self._package}.{name.replace('-', '_')}")
        classes = [found for found in vars(file).values() if isinstance(found, type) and issubclass(found, Choice)]
        own = [found for found in classes if found.__module__ == file.__name__]
        if len(own) != 1 or own[0].name != name:
            raise LyapunovPruneError(
                f"the row {name!r} stands for one {self._kind}, and {file.__name__} defines "
                f"{' and '.join(found.__name__ for found in own) or 'none'}; define one subclass there whose name is "
                f"{name.replace('_', '-')!r}"
            )
        return cast("type[T]", own[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def make(self, name: str, **options: Any) -> T:
        """An instance of the class `name` with these options. Raises LyapunovPruneError for an unknown option."""
        chosen = self[name]
        for option in options:
            if option not in chosen.options():
                others = ", ".join(other for other, known in self.items() if option in known.options())
                own = f"it has {', '.join(chosen.options())}" if chosen.options() else "it has no options"
                remedy = f"leave it out, or take one of {others}" if others else own
                raise LyapunovPruneError(f"{self._kind} {name} has no {option}; {remedy}")
        return chosen(**options)
