"""Exceptions, each with a one-line message: what is wrong and what to do about it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path


def printable(text: str) -> str:
    """`text` on one line, with characters that control a terminal (control and format) escaped, as `\\x1b`.

    Names from foreign files are shown through this, so that none adds a line or moves the cursor.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """The first line of the message of `error`, or its class name if it has none."""
    lines = str(error).strip().splitlines()
    while len(lines) > 1 and lines[0].endswith(":"):  # a heading, as from huggingface_hub's validators
        lines[:2] = [f"{lines[0]} {lines[1].strip()}"]
    return lines[0].rstrip(".") if lines else type(error).__name__


def in_short(error: Exception, most: int) -> str:
    """The class of `error` and the first `most` characters of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"


# An option in a message with its value: a placeholder, a number, or a word that messages recommend.
_VALUES = r"gsm8k:0\.02|float32|bi|kl|atp|uniform|magnitude|rtn|plain|compact|cpu|evaluation"
# A whole command line, as `prune MODEL --remove 4`, is left alone.
_COMMAND = (
    r"\blyapunov-prune [^;]*|\b(?:prune|rank|eval|compress|export|heal|check|theorems|pip install)(?: [A-Z]+)* --\S+"
)
_VALUE = rf"[A-Z]+\b|\d+%|\d[\d.,:-]*\b|(?:{_VALUES})\b"
_OPTION = re.compile(rf"{_COMMAND}|(?<![\w-])--(no-)?([a-z][a-z-]*[a-z])(?: ({_VALUE}))?")
_SHRINK = re.compile(r"lyapunov-prune shrink (?:'[^']*'|\S+) --remove (\d+) -o (\S+)")

_RENAMED = {"update-rank": "rank", "new-tokens": "steps"}  # options whose parameter has another name


def in_python(message: str) -> str:
    """`message` with command-line options as Python parameters: `--new-tokens 2` becomes `steps=2`."""

    def parameter(found: re.Match[str]) -> str:
        negated, name, value = found.groups()
        if name is None:  # a command line
            return found[0]
        if negated:
            value = "False"
        if value and value.endswith("%"):
            value = f"{int(value[:-1]) / 100:g}"
        written = f"'{value}'" if value and value.islower() else value
        return _RENAMED.get(name, name).replace("-", "_") + (f"={written}" if value else "")

    return _OPTION.sub(parameter, _SHRINK.sub(r"lp.shrink(model, tokenizer, '\2', remove=\1)", message))


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """` (did you mean X?)` if a name in `known` is as close as `cutoff` (1: the same) to `word`; else ""."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""


def like_named(path: str | Path) -> str:
    """` (did you mean X?)` if nothing is at `path` and a similar name is beside it; else ""."""
    path = Path(path)
    if path.exists() or not path.parent.is_dir():
        return ""
    return did_you_mean(str(path), [str(path.parent / file.name) for file in path.parent.iterdir()])


def first_of(faults: Mapping[str, object]) -> str | None:
    """The first of these sentences that is true; None if none is."""
    return next((fault for fault, is_true in faults.items() if is_true), None)


class LyapunovPruneError(Exception):
    """Bad input, or a model that cannot be handled. The message is one printable line with cause and remedy.

    `message` names command-line options, as printed before exiting with `exit_code`; `str()` names parameters instead
    (`in_python`).
    """

    exit_code = 2
    in_all = False  # whether every process of `accelerate launch` raises it

    def __init__(self, message: str) -> None:
        lines = map(str.strip, message.splitlines())
        self.message = printable(" ".join(filter(None, lines)))
        super().__init__(self.message)

    def __str__(self) -> str:
        return in_python(self.message)


class NonFiniteError(LyapunovPruneError):
    """A hidden state held NaN or infinity. `layer` is the first such boundary: 0 is before the first layer."""

    def __init__(self, layer: int, where: str) -> None:
        self.layer, self.where = layer, where
        place = "the input of layer 0" if layer == 0 else f"the output of layer {layer - 1}"
        super().__init__(
            f"NaN or infinite activations in {place} ({where}); "
            "load the model in a wider dtype (--dtype float32) or check its weights"
        )

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[int, str]]:
        return type(self), (self.layer, self.where)


class Diverged(LyapunovPruneError):
    """The loss or gradient of a training step is not finite."""


class CheckFailed(LyapunovPruneError):
    """A check failed (a bound, or a part of the removal check)."""

    exit_code = 1


def reason_of(error: BaseException) -> str:
    """Why `error` was raised, in a line: what the operating system says of a file, or the error's class and message."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return getattr(error, "strerror", None) or f"{kind}{first_line(error)[:300]}"


@contextmanager
def reported(what: str, remedy: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Report errors of these `kinds` (OSError if none) as LyapunovPruneError: `what` failed, the reason, the `remedy`.

    For calls into libraries and the operating system, which raise errors of their own. A LyapunovPruneError passes.
    """
    kinds = kinds or (OSError,)
    try:
        yield
    except LyapunovPruneError:
        raise
    except kinds as error:
        raise LyapunovPruneError(f"{what}: {reason_of(error)}; {remedy}") from error


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put `name`, of the matrix or lesson at work, before the message of a LyapunovPruneError."""
    try:
        yield
    except LyapunovPruneError as error:
        raise LyapunovPruneError(f"{name}: {error.message}") from None


def require_extra(module: str, extra: str, what: str) -> None:
    """Raise LyapunovPruneError if `module`, which `what` needs, is not installed; it is part of the `extra`."""
    if sys.modules.get(module) is None and importlib.util.find_spec(module) is None:
        raise LyapunovPruneError(f"{what} needs {module}; run: pip install 'lyapunov-prune[{extra}]'")
