"""What a model of a size is written as: the types that a matrix can have, and the file or folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.how import How, Stored
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.worth import Worth

Chosen = Mapping[str, How]


@dataclass(frozen=True)
class RoundedModel:
    """A copy of a model with its matrices rounded. `write` writes it, once, and returns the bytes of its tensors.

    It is given the texts that choices saw, and what the result is worth.
    """

    decoder: Decoder
    write: Callable[[Sequence[MeasuredOn], Worth], int]


class Storage(ABC):
    """A type is whatever `kinds_for` lists, with a `name`. `together` names for a matrix the one whose type it shares.

    A matrix that has one type alone costs nothing.
    """

    together: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def kinds_for(self, matrix: str, columns: int, bits: float = 0.0) -> Sequence[Any]:
        """The types that rows of so many columns can take, narrowest first, for a mean of `bits` a weight."""

    @abstractmethod
    def alike(self, bits: float) -> Sequence[Any]:
        """The types of which one for all is shown beside a mean of `bits` a weight, narrowest first."""

    @abstractmethod
    def bits_of(self, kind: Any) -> float:
        """Bits of a weight, scales included."""

    @abstractmethod
    def block(self, kind: Any) -> int:
        """So many columns of a row are rounded by themselves; 0 if all of a row are rounded together."""

    @abstractmethod
    def size_in(self, kind: Any, shape: Sequence[int]) -> int:
        """The bytes of a matrix of this shape in the type `kind`."""

    @abstractmethod
    def stored(self, W: np.ndarray, kind: Any, importance: np.ndarray) -> Stored:
        """`W` (rows × columns, float32) in the type `kind`; `importance` weights its columns."""

    @abstractmethod
    def read(self, stored: Stored, kind: Any) -> np.ndarray:
        """The numbers (rows × columns, float32) of what is `stored` in the type `kind`."""

    def rounded(self, W: np.ndarray, kind: Any, importance: np.ndarray) -> np.ndarray:
        """`W` (rows × columns, float32) as it is read back from the type `kind`; `importance` weights its columns."""
        return self.read(self.stored(W, kind, importance), kind)

    @abstractmethod
    def head(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None) -> int:
        """The bytes of what is written without the matrices, at most."""

    @abstractmethod
    def made(
        self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None, target: str | Path, chosen: Chosen
    ) -> RoundedModel:
        """The model with the matrices `chosen` rounded, to be written to `target`."""
