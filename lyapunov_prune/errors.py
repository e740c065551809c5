"""What can go wrong, in one line each: what was wrong and what to do about it."""

from __future__ import annotations


class LyapunovPruneError(Exception):
    """Bad input, or a model that cannot be handled. The message names the cause and the remedy.

    The command line prints it as one line and ends with `exit_code`.
    """

    exit_code = 2


class NonFiniteError(LyapunovPruneError):
    """A hidden state held NaN or infinity. `layer` is the first boundary: 0 is before the first layer."""

    def __init__(self, layer: int, where: str) -> None:
        self.layer = layer
        place = "the input of layer 0" if layer == 0 else f"the output of layer {layer - 1}"
        super().__init__(
            f"NaN or infinite activations in {place} ({where}); "
            "load the model in a wider dtype (--dtype float32) or check its weights"
        )


class CheckFailed(LyapunovPruneError):
    """A check was carried out and did not hold (a bound, or a part of the removal gate)."""

    exit_code = 1
