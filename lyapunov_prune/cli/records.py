"""Options that many commands share, taken as one value: a record, a frozen dataclass with an option a field."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints

from lyapunov_prune.errors import LyapunovPruneError

_MOST = 2**53  # what a float and every 64-bit counter hold, with room to add to


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer can take it: in place of every record the fields of that record, each an option.

    A record is a parameter whose default is a dataclass of fields `Annotated[type, typer.Option(…)]`. The values in
    that default are those of the options: with `text: TextOptions = TextOptions(tokens=128)`, help says 128.
    """
    parameters: list[Parameter] = []
    records: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        record = parameter.default
        if not is_dataclass(record):
            parameters.append(parameter)
            continue
        records[parameter.name] = type(record)
        options = get_type_hints(type(record), include_extras=True)
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(record, name), annotation=option)
            for name, option in options.items()
        ]

    @wraps(command)
    def called(**values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, int) and abs(value) > _MOST:
                raise LyapunovPruneError(f"--{name.replace('_', '-')} is {str(value)[:40]}; give less than 2^53")
        made = {
            name: record(**{field.name: values.pop(field.name) for field in fields(record)})
            for name, record in records.items()
        }
        command(**values, **made)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called
