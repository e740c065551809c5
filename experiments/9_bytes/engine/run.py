"""The files of bytes/run.py in llama.cpp itself: KL and perplexity there, and in torch (no paper).

    python experiments/9_bytes/engine/run.py --peer FOLDER --text FILE [--text FILE] [--model MODEL] [--size Q4_K_M]...

FOLDER is that of bytes/run.py, with float32.gguf and the files of llama.cpp's quantiser. A file of ours of the bytes of
each is written beside it. llama.cpp also rounds the inputs of matrices of few bits, to 8 bits; torch multiplies what a
file holds in float32. Each is compared with float32.gguf in the same engine, by all its log-probabilities, one window
of one pair of files at a time. Writes MODEL-TEXT.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer

import lyapunov_prune as lp
from experiments.block_types import costs_of, taken_by
from experiments.common import BUILT_IN, DITHERED, Each, Model, committed, read_text, run_command
from experiments.statements import bullets, quotient, ratio, short, table
from lyapunov_prune.budget.spend import chosen_types
from lyapunov_prune.evaluation.llama_cpp import Predictions, ask
from lyapunov_prune.export.gguf_whole import header_values, rounded_pieces
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.gguf_copy import write_pieces
from lyapunov_prune.models.how import How
from lyapunov_prune.predictions.divergence import kl_by_window
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
SIZES = ("Q3_K_M", "Q4_K_M", "Q6_K")
PEER, OURS = "llama.cpp, importance matrix", "by cost"


@dataclass(frozen=True)
class Lost:
    """KL(float32.gguf ‖ file) of every window, and by how much its loss rises, nats a token."""

    kl: tuple[float, ...]
    loss: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """A file of the size of llama.cpp's mix `size`, and what it loses in each of the two."""

    size: str
    by: str
    bytes: int
    torch: Lost
    llama_cpp: Lost


@dataclass(frozen=True)
class InEngine(Result):
    """Files on one text, by `commit`; `dense` is the loss of float32.gguf in torch and in llama.cpp, nats a token."""

    rows: tuple[Row, ...]
    dense: tuple[float, float]
    commit: str
    calibrated_on: MeasuredOn
    measured_on: MeasuredOn


def main(
    peer: Annotated[Path, typer.Option(help="the folder of llama.cpp's files")],
    model: Model = Model(f"{BUILT_IN}-dithered-0"),
    text: Each = None,
    size: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SIZES)} if not given")] = None,
    windows: Annotated[int, typer.Option(help="of 256 tokens of the built-in text, for the costs")] = 24,
    tokens: Annotated[int, typer.Option(help="of each text")] = 4096,
) -> None:
    commit, dense = committed(), model.load()
    calibration = read_text(dense, "builtin", windows * 256, 256)
    files = list(files_of(dense, calibration, peer, size or SIZES))
    for each in text or ():
        reading = read(dense, read_text(dense, each, tokens, 256, "all"))
        source, rows, plain = peer / "float32.gguf", list[Row](), 0.0
        for name, by, file in files:
            lost, plain = in_llama_cpp(reading, source, file)
            rows.append(Row(name, by, taken_by(file), in_torch(reading, file), lost))
        losses = lp.perplexity(dense, reading.batch).nll, plain
        on = calibration.measured_on(dense), reading.measured_on()
        found = InEngine(tuple(rows), losses, commit, *on)
        found.save(HERE / f"{on[1].model.name}-{Path(reading.batch.text).stem}.json")


def files_of(
    dense: Decoder, calibration: lp.TokenBatch, peer: Path, sizes: Sequence[str]
) -> Iterator[tuple[str, str, Path]]:
    """By size llama.cpp's file and ours of its bytes, with the name of either."""
    known = costs_of(dense, calibration, peer).of
    for name in sizes:
        theirs, ours = (peer / f"{by}-{name.lower()}.gguf" for by in ("imatrix", "ours"))
        pick = chosen_types(known, taken_by(theirs))
        chosen = {t.name: How(t.kinds[k], t.importance) for t, k in zip(known, pick, strict=True)}
        _, pieces, _ = rounded_pieces(dense, "f16", chosen)
        write_pieces(ours, header_values(dense, dense.tokenizer, "f16"), pieces, gguf.GGUF_DEFAULT_ALIGNMENT)
        yield from ((name, PEER, theirs), (name, OURS, ours))


def in_llama_cpp(reading: Reading, source: Path, file: Path) -> tuple[Lost, float]:
    """What `file` loses, and the mean loss of `source`, nats a token."""
    vocabulary = reading.structure.config.vocab_size
    kl, loss = list[float](), list[tuple[float, float]]()
    for window in reading.batch.ids.tolist():
        ((dense,), (small,)) = (each.windows for each in ask([source, file], [window], top=vocabulary))
        log_p, log_q = log_probabilities(dense), log_probabilities(small)
        kl.append(float(np.sum(np.exp(log_p) * (log_p - log_q), dtype=np.float64) / len(log_p)))
        loss.append((-dense.next.mean(dtype=np.float64), -small.next.mean(dtype=np.float64)))
    plain, rounded = np.array(loss).T
    return Lost(tuple(kl), tuple((rounded - plain).tolist())), float(plain.mean())


def log_probabilities(told: Predictions) -> np.ndarray:
    """Of every token of the vocabulary after each position (n − 1 × vocabulary)."""
    found = np.empty_like(told.values)
    np.put_along_axis(found, told.tokens, told.values, 1)
    return found


def in_torch(reading: Reading, file: Path) -> Lost:
    kl, rise = kl_by_window(reading, read(lp.load(file, device="cpu", dtype="float32"), reading.batch))
    return Lost(tuple(kl.tolist()), tuple(rise.tolist()))


def written() -> dict[str, str]:
    found = [InEngine.load(path) for path in sorted(HERE.glob("*.json"))]
    return {"setting": bullets(*map(_setting, found)), "table": _table(found)}


def _setting(r: InEngine) -> str:
    own, engine = (short(float(np.exp(loss))) for loss in r.dense)
    return (
        f"commit {r.commit}; costs from {r.calibrated_on.line()}; reported on {r.measured_on.line()}; dense perplexity "
        f"{own} in torch, {engine} in llama.cpp"
    )


def _table(found: Sequence[InEngine]) -> str:
    head = ("model", "text", "bytes of", "made", "MB", "perplexity × in torch", "× in llama.cpp", "KL in torch")
    rows = [
        (
            r.measured_on.model.name.split(DITHERED)[0],
            Path(r.measured_on.text).stem,
            row.size,
            row.by,
            f"{row.bytes / 1e6:.1f}",
            *(ratio(np.array(lost.loss)) for lost in (row.torch, row.llama_cpp)),
            *(f"{np.mean(lost.kl):.4f}" for lost in (row.torch, row.llama_cpp)),
            _share(r, row),
        )
        for r in found
        for row in r.rows
    ]
    return table((*head, "KL in llama.cpp", "over that of llama.cpp's own file, there"), rows)


def _share(r: InEngine, row: Row) -> str:
    (peer,) = [each for each in r.rows if (each.size, each.by) == (row.size, PEER)]
    return "" if row is peer else quotient(*(np.array(each.llama_cpp.kl) for each in (row, peer)))[1]


if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
