"""Options that many commands share, taken as one value: a record, a frozen dataclass with an option a field.

And which options were `Given`: one that would have no effect is refused, not passed over in silence.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer

from lyapunov_prune.arguments import Range
from lyapunov_prune.cli.failures import interrupted, tell
from lyapunov_prune.cli.terminal import screen
from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.progress import status

_SHARED = (  # the options that every command has
    (
        "as_json",
        Annotated[
            bool,
            typer.Option("--json", rich_help_panel="Output", help="Print one JSON document on stdout, nothing else."),
        ],
    ),
    (
        "quiet",
        Annotated[bool, typer.Option("--quiet", rich_help_panel="Output", help="No notes and no progress on stderr.")],
    ),
)

_NUMBERS = Range(-(2**53), 2**53)  # what a float and every 64-bit counter hold, with room to add to


@dataclass(frozen=True)
class Held:
    """In the annotation of an option: `check` raises LyapunovPruneError for a value before anything heavy is loaded."""

    check: Callable[[Any], object]


class Given:
    """The options that stand in the command line, each as it is written there, by its parameter."""

    def __init__(self, words: Mapping[str, str] = MappingProxyType({})) -> None:
        self._words = words

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._words

    def refuse(self, why: str, *parameters: str) -> None:
        """Raise LyapunovPruneError for the first of `parameters` that was given, its word before `why`."""
        for name in parameters:
            if name in self._words:
                raise LyapunovPruneError(f"{self._words[name]} {why}")

    def refuse_record(self, why: str, *records: Any, but: str = "", also: str = "") -> None:
        """`refuse` the options of these records, without `but` and with `also`."""
        self.refuse(why, *(field.name for record in records for field in fields(record) if field.name != but), also)


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer can take it: in place of every record the fields of that record, each an option.

    A record is a parameter whose default is a dataclass of fields `Annotated[type, typer.Option(…)]`. The values in
    that default are those of the options: with `inputs: Inputs = Inputs(tokens=128)`, help says 128. A `Range`
    or a `Held` in the annotation of an option is held before the command runs. A parameter whose default is a `Given`
    is no option; it is told which were given.
    """
    parameters = [Parameter("typer_context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    told: list[str] = []
    records: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        record = parameter.default
        if isinstance(record, Given):
            told.append(parameter.name)
            continue
        if not is_dataclass(record):
            parameters.append(parameter)
            continue
        records[parameter.name] = type(record)
        options = get_type_hints(type(record), include_extras=True)
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(record, name), annotation=option)
            for name, option in options.items()
        ]

    parameters += [Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=of) for name, of in _SHARED]
    metadata = {parameter.name: getattr(parameter.annotation, "__metadata__", ()) for parameter in parameters}
    ranges = {name: range for name, of in metadata.items() for range in of if isinstance(range, Range)}
    checks = [(name, held.check) for name, of in metadata.items() for held in of if isinstance(held, Held)]

    @wraps(command)
    def called(*, typer_context: typer.Context, as_json: bool, quiet: bool, **values: Any) -> None:
        words = {p.name: p.opts[0] for p in typer_context.command.params}
        for name, value in values.items():
            option, number, text = words[name], isinstance(value, int | float), str(value)
            wrong = {"not UTF-8, which libraries need for paths; rename it": not (number or _is_utf8(text))}
            for range in (_NUMBERS, ranges.get(name, _NUMBERS)):
                wrong[f"{text[:40]}; give a number {range.words()}"] = number and not range.holds(value)
            if why := first_of(wrong):
                raise LyapunovPruneError(f"{option if number else text} is {why}")
        for name, check in checks:
            if values[name] is not None:
                check(values[name])
        asked = dict(values)
        made = {
            name: record(**{field.name: values.pop(field.name) for field in fields(record)})
            for name, record in records.items()
        }
        given = Given({name: word for name, word in words.items() if _stands(typer_context, name)})
        began = time.time()
        try:
            with screen(str(typer_context.info_name), asked, as_json=as_json, quiet=quiet), status("starting"):
                command(**values, **made, **dict.fromkeys(told, given))
        except KeyboardInterrupt:  # typer makes it an exit code, without a word
            tell(interrupted(began))
            raise

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__doc__ = _paragraphs(inspect.getdoc(command) or "")
    return called


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of another encoding, which Python keeps as surrogates
        return False
    return True


def _paragraphs(text: str) -> str:
    """`text` with a line a paragraph, which a terminal wraps by its own width; an item of a list stays a line."""
    return re.sub(r"(?<!\n)\n(?!\n|- ) *", " ", text)


def _stands(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
