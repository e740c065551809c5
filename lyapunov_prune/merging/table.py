"""The reductions by name: the replacement of the hidden vector. Imports no torch."""

from __future__ import annotations

from typing import Final, NamedTuple


class Reduction(NamedTuple):
    """One line on a reduction, its reference, the kinds of block it applies to, and the sums it needs.

    `blocks`: "plain", "gated" or both. `needs`: names of `calibration.blocks.SUMS`.
    """

    help: str
    reference: str
    blocks: tuple[str, ...]
    needs: tuple[str, ...]


_PAPER = "boundary depth pruning"
_HERE = "for gates, which the paper does not treat"
REDUCTIONS: dict[str, Reduction] = {
    "identity": Reduction("the activation becomes the identity", _PAPER, ("plain",), ()),
    "mean-gate": Reduction("the gate becomes its mean over tokens", _HERE, ("gated",), ("gate",)),
    "scaled": Reduction(
        "the gate becomes the constant that fits each unit best", _HERE, ("gated",), ("gate_up_up", "up_up")
    ),
    "affine": Reduction(
        "the block becomes its own least-squares fit",
        "ridge regression: Hoerl and Kennard, Technometrics 12, 1970",
        ("plain", "gated"),
        ("input", "hidden", "input_input", "hidden_input"),
    ),
}
# The default of `joint`: after recovery never worse than the others, on two models (experiments/33_reductions).
DEFAULT: Final = "affine"
