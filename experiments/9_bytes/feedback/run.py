"""GPTQ onto the blocks of a `.gguf` file: do later blocks that know the error of the earlier ones lose less?

    python experiments/9_bytes/feedback/run.py --peer FOLDER [--model MODEL] [--text FILE]... [--size Q4_K_M]...

MODEL is one off its grid, as `smollm2-135m-dithered-0`. The types are those that `shrink --size` takes at the bytes of
llama.cpp's files in FOLDER (bytes/run.py), and stay the same. The head and the matrices of the layers are then written
without and with feedback (`budget.feedback`). Writes MODEL-TEXT-own.json after every row, one a text: an interrupted
run goes on. The texts decided that feedback became part of `shrink`, so none is one to report on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.block_types import Judge, costs_of, feed, filled, taken_by
from experiments.common import BUILT_IN, DITHERED, Each, Model, committed, read_text, run, show
from experiments.statements import bullets, quotient, table
from lyapunov_prune.budget.feedback import DAMPING, written_by_itself
from lyapunov_prune.budget.spend import chosen_types
from lyapunov_prune.forward.reading import read
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
SIZES = ("Q4_K_M", "Q3_K_M")
OWN = "text of its own, layers and head"
DAMPINGS = (DAMPING, 0.01)  # GPTQ's is 0.01


@dataclass(frozen=True)
class Row:
    """The bytes of llama.cpp's mix `size`: KL(dense ‖ written) of every window, nats a token.

    `damping` is that of the Gram matrices, None for a model written without feedback.
    """

    size: str
    damping: float | None
    bits: float
    kl: tuple[float, ...]


@dataclass(frozen=True)
class Feedback(Result):
    """A model written without feedback and with, on one text, by `commit`.

    `own`: as `shrink --size` does it, by text of the model's own. The results before have feedback in the layers alone,
    by the text of the costs and with the columns in their order.
    """

    rows: tuple[Row, ...]
    commit: str
    calibrated_on: MeasuredOn
    measured_on: MeasuredOn
    own: bool = False

    def find(self, size: str, damping: float | None) -> Row | None:
        return next((row for row in self.rows if (row.size, row.damping) == (size, damping)), None)


def main(
    peer: Annotated[Path, typer.Option(help="the folder of llama.cpp's files")],
    model: Model = Model(f"{BUILT_IN}-dithered-0"),
    text: Each = None,
    size: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SIZES)} if not given")] = None,
    windows: Annotated[int, typer.Option(help="of 256 tokens of the built-in text, for the costs")] = 24,
    tokens: Annotated[int, typer.Option(help="of each text")] = 4096,
) -> None:
    commit, dense = committed(), model.load()
    reading = read(dense, read_text(dense, "builtin", windows * 256, 256))
    judges = list[Judge[Feedback]]()
    for each in text or ["builtin"]:
        judged = read(dense, read_text(dense, each, tokens, 256, "evaluation" if each == "builtin" else "all"))
        on = reading.measured_on(), judged.measured_on()
        file = HERE / f"{on[0].model.name}-{Path(judged.batch.text).stem}-own.json"
        judges.append(Judge(judged, Feedback((), commit, *on, own=True), file))
    known, own = costs_of(dense, reading.batch, peer).of, written_by_itself(reading)
    weights = sum(dense.model.get_parameter(t.name).numel() for t in known)
    for damping, name in product((None, DAMPING), size or SIZES):
        lacking = [judge for judge in judges if judge.found.find(name, damping) is None]
        if not lacking:
            continue
        room = taken_by(peer / f"imatrix-{name.lower()}.gguf")
        pick = chosen_types(known, room)
        small = filled(dense.model, known, pick)
        if damping is not None:
            feed(own, known, pick, small)
        for judge in lacking:
            judge.add(Row(name, damping, 8 * room / weights, ()), small)
    show(written())


def written() -> dict[str, str]:
    found = [Feedback.load(path) for path in sorted(HERE.glob("*.json"))]
    rows = [row for r in found for row in _rows(r)]
    heads = [f"with / without, damping {damping:g}" for damping in DAMPINGS]
    shares = [f"{row[0]} at the bytes of {row[3]} on {row[1]} {row[6]}" for row in rows if row[2] == OWN]
    head = ("model", "text", "Gram matrices of", "bytes of", "bits", "KL without", *heads)
    return {"setting": bullets(*map(_setting, found)), "table": table(head, rows), "shares": "; ".join(shares)}


def _setting(r: Feedback) -> str:
    gram = f"costs from {r.calibrated_on.line()}; Gram matrices of {'as many tokens of its own' if r.own else 'these'}"
    return f"commit {r.commit}; {gram}; KL on {r.measured_on.line()}"


def _rows(r: Feedback) -> list[tuple[str, ...]]:
    name, text, rows = r.calibrated_on.model.name.split(DITHERED)[0], Path(r.measured_on.text).stem, []
    for size in dict.fromkeys(row.size for row in r.rows):
        plain, *others = (r.find(size, damping) for damping in (None, *DAMPINGS))
        if plain is not None:
            kl = np.array(plain.kl)
            shares = [quotient(np.array(other.kl), kl)[1] if other else "-" for other in others]
            gram = OWN if r.own else "built-in text, layers alone"
            rows.append((name, text, gram, size, f"{plain.bits:.2f}", f"{kl.mean():.4f}", *shares))
    return rows


if __name__ == "__main__":
    run(main)
