"""How a format stores what a plan takes out of layers that stay, in the words of the model card. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Stored:
    """What the card of a pruned checkpoint says of its format.

    `parts` says by "attention", "mlp" and "activation" what has become of such a part, `note` where the files name the
    parts that are gone. `engines`: serving engines that know the original may run the result, so the card has to say
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
