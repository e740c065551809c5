"""What stands beside every removal: the whole model, rounded to the bytes that are left."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lyapunov_prune.errors import printable


@dataclass(frozen=True)
class RoundedAlone:
    """The dense model with no layer removed, rounded to `bits` a weight, which are the bytes of the smaller one.

    `kl` is KL(dense ‖ rounded) in nats a token as second order predicts it, None if it was not. `command` makes it.
    """

    bits: float
    kl: float | None
    command: str

    def told(self) -> str:
        lost = ""
        if self.kl is not None:
            lost = f" KL {self.kl:.2g} nats a token predicted, perplexity about × {math.exp(min(self.kl, 700)):.4g};"
        return printable(f"The same bytes by rounding alone, {self.bits:.3g} bits a weight:{lost} {self.command}")
