"""The base class of readers, which make plain matrices of the packed ones in a checkpoint."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lyapunov_prune.registry import Choice

if TYPE_CHECKING:
    import torch
    from torch import nn

UNPACK = "give the original weights, or a GGUF file, which is dequantised on loading"


class Reader(Choice):
    """A way to pack matrices. A reader is a subclass in a file of its own and a row in `table.READERS`.

    `name` is the `quant_method` in the config of its checkpoints, and `settings` are what the config says beside it.
    `parts` are what a file holds in place of the tensor `weight` of a module, the numbers themselves first.
    """

    settings: Mapping[str, Any]
    parts: ClassVar[tuple[str, ...]]

    def reads(self) -> bool:
        """Whether plain matrices compute what a checkpoint with these settings does; if not, it is refused."""
        return True

    def require(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise LyapunovPruneError or ValueError if the files hold what `unpack` would misread.

        `shapes` are those of all their tensors.
        """

    @abstractmethod
    def unpack(self, stored: Mapping[str, torch.Tensor], name: str, module: nn.Module) -> torch.Tensor:
        """The matrix W (m × n) of `module`, which the model calls `name`, of its tensors in the files by part.

        It is also called for tensors on the `meta` device. Raises any error for parts that do not fit each other.
        """
