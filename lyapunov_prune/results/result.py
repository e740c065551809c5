"""Results: frozen dataclasses that know what they were measured on, each saved as one JSON file."""

from __future__ import annotations

import functools
import json
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from markupsafe import Markup

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError, in_python, printable, reported
from lyapunov_prune.results import drawing
from lyapunov_prune.results.arrays import require_fitting
from lyapunov_prune.results.axes import declared, require_axes
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.files import parsed, require_file, write_whole
from lyapunov_prune.results.frames import pd, rows
from lyapunov_prune.results.overlap import Fingerprint
from lyapunov_prune.results.wording import number
from lyapunov_prune.results.worth import Ratio

T = TypeVar("T")
R = TypeVar("R", bound="Result")
_MOST_LAYERS = 10**5
LINES = 8  # most lines in an answer
ROWS = 12  # most rows in a table unless all are asked for
MISSING = "–"  # a missing number in a table
_NUMBERS = re.compile(r'\[\n[^][{}"]*\]')  # a list of numbers in indented JSON; no string holds a line break
ASKED = "asked"  # a key in files besides the fields: what `once` compares


def versions() -> dict[str, str]:
    """Versions of everything that can change the last digits of a number."""
    return {"python": platform.python_version(), **_installed()}


@functools.cache  # every measurement asks, and each answer reads and parses a file
def _installed() -> dict[str, str]:
    return {name: version(name) for name in ("lyapunov-prune", "torch", "transformers", "numpy", "scipy")}


def table_text(frame: pd.DataFrame) -> str:
    """`frame` as lines of plain text, numbers with four digits."""
    return frame.to_string(index=False, float_format=number, na_rep=MISSING)


@dataclass(frozen=True)
class ModelIdentity:
    """Identifies a model without its weights.

    `weights` holds digests of all weights, by dtype: as they are, and rounded to every narrower one
    (`models/digest.py`). So a model is recognised after a cast, and one changed bit makes it another. `settings` holds
    the config's settings that affect the forward (`models/settings.py`), as JSON values; None in files of older
    versions.
    """

    name: str
    model_type: str
    num_layers: int
    parameters: int
    architecture: str  # SHA-256 over parameter names and shapes
    weights: dict[str, str]
    settings: dict[str, Any] | None = None
    stack: Literal[None] = None  # files of older versions may name one of two stacks

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))  # shown to users, and folders may have any name
        # Files reserve a place for each layer.
        require_fitting(0 <= self.num_layers <= _MOST_LAYERS, f"no model has {self.num_layers} layers")

    @property
    def key(self) -> dict[str, Any]:
        """What numbers depend on: all but the name."""
        return {"weights": self.weights, "settings": self.settings}

    def same_as(self, other: ModelIdentity) -> bool:
        """Whether both are the same model; raises LyapunovPruneError if their weights share no dtype, even rounded."""
        if self.architecture != other.architecture or self.other_settings(other):
            return False
        common = self.weights.keys() & other.weights.keys()
        if not common:
            mine, theirs = (", ".join(identity.weights) for identity in (self, other))
            raise LyapunovPruneError(
                f"cannot tell whether {self.name} in {mine} is {other.name} in {theirs}; "
                "load both in one dtype (--dtype)"
            )
        return all(self.weights[dtype] == other.weights[dtype] for dtype in common)

    def require(self, other: ModelIdentity, what: str, remedy: str = "measure this model") -> None:
        """Raise LyapunovPruneError unless `other`, the model of `what`, is this one. Raises as `same_as` does."""
        if not self.same_as(other):
            raise LyapunovPruneError(
                f"{what} is of {other.name} ({other.model_type}, {other.num_layers} layers), not of {self.name}"
                f"{self.other_settings(other)}; {remedy}"
            )

    def other_settings(self, other: ModelIdentity) -> str:
        """For a message: in brackets, the settings that both configs have with different values; empty if none.

        A setting that only one config has does not count, since versions of transformers differ in theirs, nor do
        numbers that are equal in float32, which is all that a GGUF header holds, nor the model type of a compact model,
        which is of the family of the other.
        """
        mine, theirs = (identity.settings or {} for identity in (self, other))
        one_family = {"model_type"} if self.model_type == other.model_type else set()
        told = [
            f"its {name} is {str(a)[:60]}, not {str(b)[:60]}"
            for name, a, b in differing(mine, theirs)
            if name not in one_family
        ]
        return printable(f" ({'; '.join(told)})") if told else ""


def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The settings that both have with different values, as `outer.inner`, and both values; see `other_settings`."""
    for name, value in mine.items():
        other = theirs.get(name, value)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from ((f"{name}.{inner}", a, b) for inner, a, b in differing(value, other))
        elif _rounded(value) != _rounded(other):
            yield name, value, other


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return np.float32(value) if isinstance(value, float) else value


@dataclass(frozen=True)
class MeasuredOn:
    """What a number was measured on. Two numbers can be compared when these agree."""

    model: ModelIdentity
    dtype: str
    device: str
    text: str  # source of the text or images
    split: str  # calibration, evaluation or all
    text_hash: str  # SHA-256 of the token ids, or of pixels and labels
    tokens: int  # for images their number
    context: int  # for images their width in pixels
    bos: bool | None  # None: token ids were given directly, or images
    seed: int | None
    versions: dict[str, str]
    fingerprint: Fingerprint | None = None  # of the tokens or images; None in files of older versions
    images: bool = False
    short: Fingerprint | None = None  # of shorter runs, for items; None for images and in older files

    @property
    def key(self) -> dict[str, Any]:
        """What a number depends on, whatever model and text are called: as unfinished work is kept by (`Kept`)."""
        names = ("dtype", "device", "text_hash", "tokens", "context", "seed", "versions")
        return {"model": self.model.key, **{name: getattr(self, name) for name in names}}

    def line(self) -> str:
        if self.images:
            return printable(
                f"{self.model.name}, {self.dtype} on {self.device}; {self.tokens} images of {self.text} "
                f"({self.split}, {self.text_hash[:12]}), {self.context} pixels wide"
            )
        bos = {True: "BOS", False: "no BOS", None: "ids given"}[self.bos]
        return printable(
            f"{self.model.name}, {self.dtype} on {self.device}; {self.tokens} tokens of {self.text} "
            f"({self.split}, {self.text_hash[:12]}), context {self.context}, {bos}"
        )


class Result:
    """Base of every result: prints as an answer above a table, converts with `to_frame`, saves to one JSON file.

    NaN and infinities are written as the strings JSON lacks (`"NaN"`), so files stay strict JSON. A field may not be
    called `kind`: a file says its class there.
    """

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__annotations__:
            raise TypeError(f"{cls.__name__} has a field `kind`, under which a file says its class; name it otherwise")
        if "__repr__" not in cls.__dict__:  # otherwise `dataclass` would print every field
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        require_axes(self)

    def to_frame(self) -> pd.DataFrame:
        """What was measured, one row each: the fields with the one axis that the first such field declares.

        A record that is only read by code may have none.
        """
        names: dict[Any, list[str]] = {}
        for name, per in declared(type(self)).items():  # type: ignore[arg-type]
            if len(per.axes) == 1:
                names.setdefault(per.axes[0], []).append(name)
        if not names:
            raise NotImplementedError
        axis, fields = next(iter(names.items()))
        return rows(self, axis, *fields)

    def headline(self) -> str:
        """What was measured and on what; empty by default."""
        return ""

    def answer(self) -> list[str]:
        """What a person can act on, in at most `LINES` lines of plain text; the headline by default."""
        return self.headline().split("\n")[:LINES] if self.headline() else []

    def against_dense(self) -> Ratio | None:
        """The perplexity beside the dense model's, where this was measured; None by default."""
        return None

    def conclusion(self) -> str:
        """What came out, with its interval, and what it means; empty where no perplexity was compared."""
        ratio = self.against_dense()
        return "" if ratio is None else f"P{ratio.told()[1:]}. {ratio.means()}"

    def summary(self) -> pd.DataFrame:
        """The table of the report page: the whole frame, unless it would be too long to read."""
        return self.to_frame()

    def brief(self) -> pd.DataFrame:
        """The rows that matter, at most `ROWS`; the first of `summary` by default."""
        return self.summary().head(ROWS)

    def following(self) -> str:
        """The command to give next, without the name of the program; empty by default."""
        return ""

    def next_step(self) -> str:
        """The same as a line that people read; empty too."""
        command = self.following()
        return command and f"Next: lyapunov-prune {command}"

    def further(self) -> list[Result]:
        """Further tables of this result, each with its own answer."""
        return []

    def unshown(self, where: str) -> str:
        """Says how many rows `brief` leaves out and `where` they are; empty if none."""
        shown, rows = len(self.brief()), len(self.summary())
        return f"{shown} of {rows} rows; {where}" if shown < rows else ""

    def _below(self) -> list[str]:
        """What stands below the table in Python."""
        lines = (self.unshown("to_frame() has all"), self.conclusion(), self.next_step())
        return [in_python(line) for line in lines if line]

    def _answer_in_python(self) -> list[str]:
        return [in_python(line) for line in self.answer()]

    def __str__(self) -> str:
        return "\n".join((*self._answer_in_python(), table_text(self.brief()), *self._below()))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """The same as HTML, for notebooks."""
        lines = Markup("<br>").join(self._answer_in_python())
        table = Markup(self.brief().to_html(index=False, border=0, float_format=number, na_rep=MISSING))
        return Markup("<p>{}</p>{}<p>{}</p>").format(lines, table, Markup("<br>").join(self._below()))

    def plot(self) -> Any:
        """The figures of this result on the report page, shown in a notebook; see `report.figures.Figures`.

        Raises LyapunovPruneError if it has none.
        """
        return drawing.figures_of(self)

    def to_json(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **encode(self)}

    @checked
    def save(self, path: str | Path, asked: Mapping[str, Any] | None = None) -> Path:
        """Write the result as JSON, whole or not at all; `asked` holds the parameters of `once`. Returns the path."""
        content = self.to_json() | ({ASKED: asked} if asked else {})
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        return write_whole(path, _NUMBERS.sub(lambda found: f"[{' '.join(found[0][1:-1].split())}]", text))

    @classmethod
    @checked
    def load(cls: type[R], path: str | Path) -> R:
        """Read a result of this class; raises LyapunovPruneError when the file is not one."""
        with reported(f"cannot read {path}", "give the file a run wrote"):
            require_file(path)
            content = Path(path).read_bytes()
        return cls.parse(content, path)

    @classmethod
    def parse(cls: type[R], content: bytes, path: str | Path) -> R:
        """`load` from `content`, which is at `path` or part of it."""
        try:
            data = parsed(content.decode("utf-8"))
            kind = data.pop("kind", None) if isinstance(data, dict) else None
            if kind == cls.__name__:
                data.pop(ASKED, None)
                return decode(cls, data)
            why = f"it holds {kind or 'no result'}"
        except ValueError as error:
            why = str(error)
        raise LyapunovPruneError(
            f"{path} does not fit this version's {cls.__name__} ({why}); make it again, or give the file a run wrote"
        )


class Reported:
    """Base of a model with the `report` of what was done to it; it prints as the report."""

    report: Result

    def __repr__(self) -> str:
        return repr(self.report)

    def _repr_html_(self) -> str:
        return self.report._repr_html_()
