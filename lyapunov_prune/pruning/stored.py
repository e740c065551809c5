"""The model card's words on how a format stores parts that a plan removes from layers that stay. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class FormatNotes:
    """The sentences of a pruned checkpoint's card about its format.

    `parts` says for "attention" and "activation" what became of a removed part; `note` says where the files name
    them. `engines` is true if serving engines that know the original may run the result, so that the card has to say
    which kinds of layers are left.
    """

    name: str
    parts: Mapping[str, str]
    note: str = ""
    engines: bool = False


PLAIN: Final = FormatNotes("plain", {}, engines=True)
