"""Check the arguments of public functions against their annotations before any work is done."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Number, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from lyapunov_prune.errors import LyapunovPruneError

P = ParamSpec("P")
T = TypeVar("T")


class Range(NamedTuple):
    """The numbers that `Annotated[float, Range(…)]` allows: `least` to `most`.

    With `above`, a number must exceed `least`; with `below`, it must be less than `most`.
    """

    least: float = 0
    most: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, number: float) -> bool:
        over = self.least < number if self.above else self.least <= number
        return over and (number < self.most if self.below else number <= self.most)

    def words(self) -> str:
        least = f"above {self.least}" if self.above else f"from {self.least}"
        if self.most == math.inf:
            return least if self.above else f"of {self.least} or more"
        return f"{least} to {'less than ' * self.below}{self.most}"


class AtLeast(NamedTuple):
    """The collections that `Annotated[Sequence[T], AtLeast(n)]` allows: those of `number` entries or more."""

    number: int

    def holds(self, entries: Collection[Any]) -> bool:
        return len(entries) >= self.number

    def words(self) -> str:
        return f"({self.number} or more)"


SOME = AtLeast(1)


class Parsed(NamedTuple):
    """In `Annotated[T, Parsed(kind, make)]`: callers give a `kind`, and `checked` passes `make` of it on."""

    kind: Any
    make: Callable[[Any], Any]


MOST_SEED = 2**32 - 1  # torch and numpy accept it, even multiplied by a window's number
Seed = Annotated[int, Range(0, MOST_SEED)]
Seeds = Iterable[Seed]
Count = Annotated[int, Range(1)]
Positive = Annotated[float, Range(above=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Part = Annotated[float, Range(0, 1, above=True, below=True)]
Amount = Count | Part  # so many, or such a share of all


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator that raises LyapunovPruneError for an argument that does not match its annotation.

    Once all arguments match, those annotated with `Parsed` are replaced by their parsed values.

    numpy's numbers count as numbers; True, NaN and infinity do not, nor does a number outside its `Range` (arrays may
    hold NaN for unknown values). Any collection except text counts as a sequence, and any module as a model; wrapped
    models are checked later. Names of registries are checked where they are used. A missing or surplus
    argument stays a TypeError.
    """
    signature = inspect.signature(function)
    # Lazily, because annotations may need later imports.
    hints = cache(lambda: get_type_hints(function, include_extras=True))

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind_partial(*args, **kwargs)
        for name, value in bound.arguments.items():
            hint, kind = hints().get(name, Any), signature.parameters[name].kind
            further = value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
            for told, given in further.items():
                if not (fits(given, hint) and is_finite(given)):
                    wanted = words(hint) if is_finite(given) else "a finite number"
                    raise LyapunovPruneError(f"{function.__name__}: {told} is {_shown(given)}; give {wanted}")
        for name, value in bound.arguments.items():
            if parsed := _parsed(hints().get(name)):
                bound.arguments[name] = parsed.make(value)
        return function(*bound.args, **bound.kwargs)

    return run


def is_finite(value: Any) -> bool:
    """Whether `value` is neither NaN nor infinite, which only floats can be."""
    return isinstance(value, Integral) or not isinstance(value, Real) or math.isfinite(value)


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` matches the annotation `hint`, by the rules of `checked`."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return any(type(value) is type(known) and value == known for known in inner)
    if parsed := _parsed(hint):
        return fits(value, parsed.kind)
    if origin is Annotated:
        return fits(value, inner[0]) and all(r.holds(value) for r in inner[1:] if isinstance(r, Range | AtLeast))
    if origin in (Union, UnionType):
        return any(fits(value, either) for either in inner)
    if origin is tuple and Ellipsis not in inner:
        return isinstance(value, tuple | list) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(fits(each, inner[1]) for each in value.values())
    if origin in (Sequence, Iterable):
        one = isinstance(value, str | bytes | Mapping) or getattr(value, "shape", None) == ()
        if isinstance(value, range):
            value = (*value[:1], *value[-1:])  # one type, and possibly billions of items
        several = isinstance(value, Iterable) and not one
        return several and (not isinstance(value, Collection) or all(fits(each, inner[0]) for each in value))
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    kind = origin or hint
    if not isinstance(kind, type):  # a type variable
        return True
    torch: Any = sys.modules.get("torch")  # not imported here, because the command line imports this file
    is_module = torch is not None and issubclass(kind, torch.nn.Module)
    return isinstance(value, torch.nn.Module if is_module else kind)


def words(hint: Any) -> str:
    """An annotation in words: `int or None`, `several int`, `int from 0 to 9`."""
    origin, inner = get_origin(hint), get_args(hint)
    if parsed := _parsed(hint):
        return words(parsed.kind)
    if origin is Annotated:
        return " ".join((words(inner[0]), *(r.words() for r in inner[1:] if isinstance(r, Range | AtLeast))))
    if origin in (Union, UnionType):
        return " or ".join(map(words, inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return f"a tuple of {', '.join(map(words, inner))}"
    if origin is Mapping:
        return f"a mapping to {words(inner[1])}"
    if origin in (Sequence, Iterable):
        return f"several {words(inner[0])}"
    return "None" if hint is NoneType else getattr(hint, "__name__", str(hint))


def _parsed(hint: Any) -> Parsed | None:
    """The `Parsed` in the annotation `hint`; None if the argument is not parsed."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Parsed)), None)


def _shown(value: Any) -> str:
    text = repr(value) if value is None or isinstance(value, str | Number | tuple | list) else ""
    return text if 0 < len(text) <= 40 else f"a {type(value).__name__}"
