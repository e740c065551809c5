"""What the experiments on bytes share: costs, what matrices read and make, a model in chosen types, and its judge."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.cost import TensorCost, costs
from lyapunov_prune.budget.feedback import OwnText, fed_forward
from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.how import How
from lyapunov_prune.predictions.divergence import kl_by_window
from lyapunov_prune.results.result import Result

Found = TypeVar("Found", bound=Result)
OURS, SQUARES = "Fisher", "squares"  # importances of columns


@dataclass(frozen=True)
class Costs:
    """The costs of a model by one importance of columns, what they took, and a forward of the same tokens."""

    of: list[TensorCost]
    seconds: float
    forward: float


@torch.no_grad()
def read_and_made(reading: Reading) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The mean square of every input (columns,), and the mean energy `E‖Wx‖²`, of each matrix that multiplies states.

    Means are over the tokens of the reading, in float64, by the model's names; a bias is no part of the energy.
    """
    named = {id(p): name for name, p in matrices_of(reading.model).items()}
    matrices = [m for m in reading.model.modules() if isinstance(m, nn.Linear)]
    squares = {named[id(m.weight)]: np.zeros(m.in_features) for m in matrices}
    energy = dict.fromkeys(squares, 0.0)

    def add(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = named[id(module.weight)]
        made = output if module.bias is None else output - module.bias
        squares[name] += args[0].flatten(0, -2).double().square().sum(0).cpu().numpy()
        energy[name] += float(made.double().square().sum())

    with hooked(after=[(module, add) for module in matrices]):
        for ids in reading.windows(1):
            reading.model(ids, use_cache=False)
    tokens = reading.batch.tokens
    return {name: x / tokens for name, x in squares.items()}, {name: x / tokens for name, x in energy.items()}


def mean_squares(decoder: Decoder, batch: lp.TokenBatch) -> dict[str, np.ndarray]:
    """The mean squared input of every column of a matrix that multiplies states, by the model's names."""
    squares, _ = read_and_made(read(decoder, batch))
    return {name: values.astype(np.float32) for name, values in squares.items()}


def costs_of(dense: Decoder, calibration: lp.TokenBatch, folder: Path, by: str = OURS) -> Costs:
    """Measured once: they are kept in the folder of llama.cpp's files."""
    kept = folder / f"costs-{by}.pickle"
    if kept.exists():
        known: Costs = pickle.loads(kept.read_bytes())
        return known
    reading = read(dense, calibration)
    few, start = reading.windows(1)[:4], time.perf_counter()
    with torch.no_grad():
        for ids in few:
            dense.model(ids, use_cache=False)
    forward = (time.perf_counter() - start) * len(calibration) / len(few)
    importance = None if by == OURS else mean_squares(dense, calibration)
    start = time.perf_counter()
    found = list(costs(reading, importance=importance))
    known = Costs(found, time.perf_counter() - start, forward)
    kept.write_bytes(pickle.dumps(known))
    return known


@torch.no_grad()
def fill(small: nn.Module, dense: nn.Module, known: Sequence[TensorCost], pick: np.ndarray) -> None:
    """The matrices of `small` become those of `dense` in the types `pick`."""
    for t, k in zip(known, pick, strict=True):
        W = dense.get_parameter(t.name).detach().numpy()
        small.get_parameter(t.name).copy_(torch.from_numpy(BLOCKS.rounded(W, t.kinds[k], t.importance)))


def filled(dense: PreTrainedModel, known: Sequence[TensorCost], pick: np.ndarray) -> PreTrainedModel:
    """A copy of `dense` in the types `pick`."""
    small = copy.deepcopy(dense)
    fill(small, dense, known, pick)
    return small


def feed(own: OwnText, known: Sequence[TensorCost], pick: np.ndarray, small: PreTrainedModel) -> None:
    """`small`, that has the types `pick`, becomes what they are with feedback by the text of `own`."""
    fed_forward(own, BLOCKS, {t.name: How(t.kinds[k], t.importance) for t, k in zip(known, pick, strict=True)}, small)


def taken_by(file: Path) -> int:
    """The bytes of the matrices in a GGUF file."""
    return sum(t.size for t in read_header(file).tensors if len(t.dims) == 2)


def divergence(reading: Reading, model: PreTrainedModel) -> np.ndarray:
    """`KL(dense ‖ model)` of every window (windows,), nats a token; `reading` is that of the dense model."""
    return kl_by_window(reading, read(wrap(model), reading.batch))[0]


@dataclass
class Judge(Generic[Found]):
    """The dense model's reading of one text, and the result that grows in `file`, by `rows` that each have their `kl`.

    What an interrupted run has left in `file` is taken in place of `found`.
    """

    reading: Reading
    found: Found
    file: Path

    def __post_init__(self) -> None:
        if self.file.exists():
            self.found = type(self.found).load(self.file)

    def add(self, row: Any, model: PreTrainedModel) -> None:
        """Add `row`, with the KL of `model`, and save the result."""
        kl, found = divergence(self.reading, model), cast("Any", self.found)
        self.found = replace(found, rows=(*found.rows, replace(row, kl=tuple(kl.tolist()))))
        self.found.save(self.file)
        print(self.file.stem, row, f"{kl.mean():.4f}", flush=True)
