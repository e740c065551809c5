"""GPTQ onto the blocks of a `.gguf` file: do later blocks that know the error of the earlier ones lose less?

    python experiments/9_bytes/feedback/run.py --peer FOLDER [--model MODEL] [--text FILE]... [--size Q4_K_M]...

MODEL is one off its grid, as `smollm2-135m-dithered-0`. The types are those that `shrink --size` takes at the bytes of
llama.cpp's files in FOLDER (bytes/run.py), and stay the same. The head and the matrices of the layers are then written
without and with feedback (`budget.feedback`). Writes MODEL-TEXT.json after every row, one a text: an interrupted run
goes on. The texts decided that feedback became part of `shrink`, so none is one to report on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from transformers import PreTrainedModel

from experiments.block_types import Judge, costs_of, fill, taken_by
from experiments.common import BUILT_IN, DITHERED, Each, Model, committed, read_text, run, show
from experiments.statements import bullets, quotient, table
from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.cost import TensorCost
from lyapunov_prune.budget.feedback import fed_forward
from lyapunov_prune.budget.spend import chosen_types
from lyapunov_prune.budget.storage import How
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
SIZES = ("Q4_K_M", "Q3_K_M")


@dataclass(frozen=True)
class Row:
    """The bytes of llama.cpp's mix `size`, with feedback if `fed`: KL(dense ‖ written) by window, nats a token."""

    size: str
    fed: bool
    bits: float
    kl: tuple[float, ...]


@dataclass(frozen=True)
class Feedback(Result):
    """A model written without feedback and with, on one text, by `commit`."""

    rows: tuple[Row, ...]
    commit: str
    calibrated_on: MeasuredOn
    measured_on: MeasuredOn

    def find(self, size: str, fed: bool) -> Row | None:
        return next((row for row in self.rows if (row.size, row.fed) == (size, fed)), None)


def main(
    peer: Annotated[Path, typer.Option(help="the folder of llama.cpp's files")],
    model: Model = Model(f"{BUILT_IN}-dithered-0"),
    text: Each = None,
    size: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SIZES)} if not given")] = None,
    windows: Annotated[int, typer.Option(help="of 256 tokens of the built-in text, for costs and Gram matrices")] = 24,
    tokens: Annotated[int, typer.Option(help="of each text")] = 4096,
) -> None:
    commit, dense = committed(), model.load()
    reading = read(dense, read_text(dense, "builtin", windows * 256, 256))
    judges = list[Judge[Feedback]]()
    for each in text or ["builtin"]:
        judged = read(dense, read_text(dense, each, tokens, 256, "evaluation" if each == "builtin" else "all"))
        on = reading.measured_on(), judged.measured_on()
        file = HERE / f"{on[0].model.name}-{Path(judged.batch.text).stem}.json"
        judges.append(Judge(judged, Feedback((), commit, *on), file))
    known = costs_of(dense, reading.batch, peer).of
    weights = sum(dense.model.get_parameter(t.name).numel() for t in known)
    for fed, name in product((False, True), size or SIZES):
        lacking = [judge for judge in judges if judge.found.find(name, fed) is None]
        if not lacking:
            continue
        room = taken_by(peer / f"imatrix-{name.lower()}.gguf")
        small = made(reading, known, chosen_types(known, room), fed)
        for judge in lacking:
            judge.add(Row(name, fed, 8 * room / weights, ()), small)
    show(written())


def made(reading: Reading, known: Sequence[TensorCost], pick: np.ndarray, fed: bool) -> PreTrainedModel:
    """The model with the types `pick`, with feedback if `fed`."""
    small = copy.deepcopy(reading.model)
    fill(small, reading.model, known, pick)
    if fed:
        chosen = {t.name: How(t.kinds[k], t.importance) for t, k in zip(known, pick, strict=True)}
        fed_forward(reading, BLOCKS, chosen, small)
    return small


def written() -> dict[str, str]:
    found = [Feedback.load(path) for path in sorted(HERE.glob("*.json"))]
    return {"setting": bullets(*map(_setting, found)), "table": _table(found)}


def _setting(r: Feedback) -> str:
    return f"commit {r.commit}; costs and Gram matrices from {r.calibrated_on.line()}; KL on {r.measured_on.line()}"


def _table(found: Sequence[Feedback]) -> str:
    rows = []
    for r in found:
        name, text = r.calibrated_on.model.name.split(DITHERED)[0], Path(r.measured_on.text).stem
        for size in dict.fromkeys(row.size for row in r.rows):
            plain, fed = (r.find(size, how) for how in (False, True))
            if plain is not None and fed is not None:
                kl = np.array(plain.kl)
                share = quotient(np.array(fed.kl), kl)[1]
                rows.append((name, text, size, f"{plain.bits:.2f}", f"{kl.mean():.4f}", share))
    return table(("model", "text", "bytes of", "bits", "KL without", "with / without"), rows)


if __name__ == "__main__":
    run(main)
