"""The model card's words on how a format stores parts that a plan removes from layers that stay. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Stored:
    """The sentences of a pruned checkpoint's card about its format.

    `parts` says for "attention", "mlp" and "activation" what became of a removed part; `note` says where the files name
    them. `engines` is true if serving engines that know the original may run the result, so that the card has to say
    which kinds of layers are left.
    """

    name: str
    parts: Mapping[str, str]
    note: str = ""
    engines: bool = False


_SIZE = """In this plain checkpoint it saves no time or
memory; only removing whole layers does."""
_ZERO = f"""The output projection is zero,
which computes the same as leaving the branch out. {_SIZE}"""
PLAIN: Final = Stored(
    "plain",
    {
        "attention": _ZERO,
        "mlp": _ZERO,
        "activation": f"""The block is one linear map, written
into both of its matrices so that the activation cancels, σ(x) − σ(−x) = x. {_SIZE}""",
    },
    engines=True,
)
