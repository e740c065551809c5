"""The same bytes, by llama.cpp's mixes and by `shrink --size`: KL from the dense model on unseen text.

    python experiments/9_bytes/bytes/run.py --peer FOLDER --text FILE [--text FILE] [--model MODEL] [--size Q4_K_M]...

MODEL is one off its grid, as `smollm2-135m-dithered-0`, and is the reference. The first run writes it into FOLDER as
float32.gguf, with the mean squared input of every matrix on the tokens of the Fisher information, by the names of
llama.cpp's tensors (imatrix.npz). llama.cpp's own quantiser then has to write FOLDER/imatrix-q4_k_m.gguf with those
importances, FOLDER/plain-q4_k_m.gguf without, and so on for every size; the next run measures those that are there, and
models of the bytes of the first: the types alone, and what `shrink` writes, with feedback if that is better on the
built-in text. Without --text it compares the importances of columns, on the half of the built-in text that chooses.
Writes MODEL-TEXT.json after every row, one a text: an interrupted run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.block_types import (
    OURS,
    SQUARES,
    Costs,
    Judge,
    costs_of,
    divergence,
    feed,
    fill,
    filled,
    mean_squares,
    taken_by,
)
from experiments.common import BUILT_IN, DITHERED, Each, Model, committed, draw, read_text, run, show
from experiments.statements import bullets, quotient, short, table
from lyapunov_prune.budget.cost import TensorCost
from lyapunov_prune.budget.feedback import OwnText, written_by_itself
from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.budget.spend import chosen_types
from lyapunov_prune.export.gguf_whole import header_values, rounded_pieces
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.gguf_copy import write_pieces
from lyapunov_prune.models.gguf_metadata import gguf_family
from lyapunov_prune.predictions.divergence import SkipDivergence
from lyapunov_prune.report.drawing import COLOURS, grid, log_axis, svg, with_intervals
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
CHOOSING = HERE / "importances"  # on the text that the default was chosen on
SKIPPED = HERE.parents[1] / "2_criteria" / "removal_criteria" / "divergence.json"
SIZES = ("Q4_K_M", "Q3_K_M", "Q6_K", "IQ4_XS", "Q5_K_M", "Q2_K")  # the first of them first, if time ends
# The mixes of llama.cpp by the beginning of their files' names; ours is named by the importance of columns.
PLAIN, PEER, FED = "plain", "imatrix", "fed"
NAMES = {PLAIN: "llama.cpp", PEER: "llama.cpp, importance matrix", OURS: "by cost", FED: "by cost, with feedback"}
WRITTEN = FED, OURS  # what `shrink` writes, or else the types alone
BITS = 4.0  # from here on the prediction is to hold


@dataclass(frozen=True)
class Fed:
    """The mean KL `without` feedback and `with_it` on the built-in text; the row is of the smaller.

    Feedback took `seconds` of the processor, the writing of its text among them, a forward of that text `forward`.
    """

    without: float
    with_it: float
    seconds: float
    forward: float


@dataclass(frozen=True)
class Row:
    """A file of the size of llama.cpp's mix `size`: bytes of its matrices, KL(dense ‖ file) a window, nats a token.

    Made by `commit`, if that is not the result's.
    """

    size: str
    by: str
    bytes: int
    bits: float
    predicted: float | None
    kl: tuple[float, ...]
    fed: Fed | None = None
    commit: str | None = None

    @property
    def mean(self) -> float:
        return float(np.mean(self.kl))


@dataclass(frozen=True)
class Bytes(Result):
    """Files of equal bytes on one text, by `commit`; the costs took `seconds`, a forward of their tokens `forward`."""

    rows: tuple[Row, ...]
    seconds: float
    forward: float
    calibrated_on: MeasuredOn
    commit: str
    measured_on: MeasuredOn

    @property
    def model(self) -> str:
        return self.calibrated_on.model.name

    def find(self, size: str, by: str) -> Row | None:
        return next((row for row in self.rows if (row.size, row.by) == (size, by)), None)


def main(
    peer: Annotated[Path, typer.Option(help="the folder of llama.cpp's files")],
    model: Model = Model(f"{BUILT_IN}-dithered-0"),
    text: Each = None,
    size: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(SIZES)}; all if not given")] = None,
    windows: Annotated[int, typer.Option(help="of 256 tokens of the built-in text, for the Fisher information")] = 24,
    tokens: Annotated[int, typer.Option(help="of each text")] = 4096,
) -> None:
    dense = model.load()
    calibration = read_text(dense, "builtin", windows * 256, 256)
    if not (peer / "float32.gguf").exists():
        write_source(dense, calibration, peer)
        print(f"{peer} has what llama.cpp's quantiser reads; run it, and this again")
        return
    ways = (OURS, PEER, PLAIN, FED) if text else (OURS, SQUARES)
    texts = [read_text(dense, each, tokens, 256, "all") for each in text or ()]
    known = {by: costs_of(dense, calibration, peer, by) for by in ways if by in (OURS, SQUARES)}
    on = calibration.measured_on(dense)
    judges = [
        judge_of(dense, batch, HERE if text else CHOOSING, known[OURS], on)
        for batch in texts or [read_text(dense, "builtin", tokens, 256, "evaluation")]
    ]
    feedback = Feedback(read(dense, calibration), read(dense, read_text(dense, "builtin", 2048, 256, "evaluation")))
    weights = sum(p.numel() for p in matrices_of(dense.model).values())
    for by, name in product(ways, size or SIZES):
        file = peer / f"{PLAIN if by == PLAIN else PEER}-{name.lower()}.gguf"
        lacking = [judge for judge in judges if judge.found.find(name, by) is None]
        mix = next((row for judge in judges if (row := judge.found.find(name, PEER))), None)
        if not lacking or not (file.exists() or (mix and by in (*known, FED))):
            continue
        room, fed = mix.bytes if mix else taken_by(file), None
        if by in known:
            small, taken, predicted = spent(dense, known[by].of, chosen_types(known[by].of, room))
        elif by == FED:
            pick = chosen_types(known[OURS].of, room)
            small, taken, predicted = spent(dense, known[OURS].of, pick)
            fed = feedback.given(known[OURS].of, pick, small)
        else:
            small, taken, predicted = lp.load(file, device=model.device, dtype="float32").model, taken_by(file), None
        for judge in lacking:
            judge.add(Row(name, by, taken, 8 * taken / weights, predicted, (), fed, committed()), small)
        del small
    draw(HERE, {"bytes": figure(results(HERE))})
    show(written())


def judge_of(dense: Decoder, batch: lp.TokenBatch, folder: Path, known: Costs, on: MeasuredOn) -> Judge[Bytes]:
    file = folder / f"{on.model.name}-{Path(batch.text).stem}.json"
    made = Bytes((), known.seconds, known.forward, on, committed(), batch.measured_on(dense))
    return Judge(read(dense, batch), made, file)


def write_source(dense: Decoder, calibration: lp.TokenBatch, peer: Path) -> None:
    """The model as a GGUF file of float32, and the mean squared inputs by the names of that file."""
    config = dense.structure.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == gguf_family(config).architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    squares = mean_squares(dense, calibration)
    named = {str(names.get_name(own, try_suffixes=(".weight",))): values for own, values in squares.items()}
    np.savez(peer / "imatrix.npz", allow_pickle=False, **named)
    _, pieces, _ = rounded_pieces(dense, "f32")
    values = header_values(dense, dense.tokenizer, "f32")
    write_pieces(peer / "float32.gguf", values, pieces, gguf.GGUF_DEFAULT_ALIGNMENT)


class Feedback:
    """What `shrink` does once the types are chosen: `reading` is that of the costs, and `decides` what is written."""

    def __init__(self, reading: Reading, decides: Reading) -> None:
        self.reading, self.decides = reading, decides

    @cached_property
    def own(self) -> tuple[OwnText, float, float]:
        """The text that the model writes, the seconds of the processor that took, and those of a forward of it."""
        start = time.process_time()
        own = written_by_itself(self.reading)
        wrote = time.process_time()
        with torch.no_grad():
            for ids in own.reading.windows(1):
                own.reading.model(ids, use_cache=False)
        return own, wrote - start, time.process_time() - wrote

    def given(self, known: Sequence[TensorCost], pick: np.ndarray, small: PreTrainedModel) -> Fed:
        """`small`, that has the types `pick`, gets feedback if that has the smaller KL."""
        own, wrote, forward = self.own
        before = float(divergence(self.decides, small).mean())
        start = time.process_time()
        feed(own, known, pick, small)
        seconds, after = time.process_time() - start, float(divergence(self.decides, small).mean())
        if before <= after:
            fill(small, self.reading.model, known, pick)
        return Fed(before, after, wrote + seconds, forward)


@torch.no_grad()
def spent(dense: Decoder, known: Sequence[TensorCost], pick: np.ndarray) -> tuple[PreTrainedModel, int, float]:
    """The model with the types `pick`, the bytes that they take, and what they cost."""
    pairs = list(zip(known, pick, strict=True))
    return (
        filled(dense.model, known, pick),
        int(sum(t.bytes[k] for t, k in pairs)),
        float(sum(t.cost[k] for t, k in pairs)),
    )


def results(folder: Path) -> list[Bytes]:
    return [Bytes.load(path) for path in sorted(folder.glob("*.json"))]


def figure(rows: Sequence[Bytes]) -> str:
    """KL over the bytes of all matrices, in the mean over the texts with bars from text to text: a panel a model."""
    models = list(dict.fromkeys(r.model for r in rows))
    drawing, cells = grid(3.6 * len(models), 3.2, len(models), len(models))
    for axes, name in zip(cells, models, strict=True):
        for by, colour in zip(NAMES, COLOURS.values(), strict=False):
            texts = [{row.bytes: row.mean for row in r.rows if row.by == by} for r in rows if r.model == name]
            sizes = sorted(set.intersection(*map(set, texts)))
            kl = np.array([[text[size] for text in texts] for size in sizes])
            if sizes:
                ends = np.stack([kl.min(1), kl.max(1)], 1)
                with_intervals(axes, np.array(sizes) / 1e6, kl.mean(1), ends, color=colour, marker="o", label=NAMES[by])
        log_axis(axes)
        axes.set_title(name.split(DITHERED)[0])
    cells[-1].legend(frameon=False)
    cells[0].set_ylabel("KL from the dense model, nats a token")
    for axes in cells:
        axes.set_xlabel("MB of matrices")
    return svg(drawing)


def written(folder: Path = HERE) -> dict[str, str]:
    rows = results(folder)
    return {
        "setting": bullets(*map(_setting, rows)),
        "short": _short(rows),
        "table": _table(rows),
        "median": "; ".join(_median(rows, name) for name in dict.fromkeys(r.model for r in rows)),
        "feedback": "; ".join(_feedback(rows, name) for name in dict.fromkeys(r.model for r in rows if _fed(r))),
        "predicted": _predicted(rows),
        "predicted_there": _predicted_there(rows),
        "importances": _importances(results(CHOOSING)),
        "layers": _layers(rows),
    }


def _setting(r: Bytes) -> str:
    on, of = r.measured_on, r.calibrated_on
    later = sorted({(row.by, row.commit) for row in r.rows if row.commit not in (None, r.commit)})
    return (
        f"{r.model}, {on.dtype} on {on.device}: commit {r.commit}; costs, importances and llama.cpp's importance "
        f"matrix from {of.tokens} tokens of {of.text} ({of.split}, {of.text_hash[:12]}), context {of.context}; KL on "
        f"{on.tokens} tokens of {on.text} ({on.text_hash[:12]}), context {on.context}; costs in "
        f"{short(r.seconds / r.forward)} times a forward of their tokens"
        + "".join(f"; rows {NAMES[by]} of commit {commit}" for by, commit in later)
    )


def _pairs(r: Bytes, by: str = PEER, ours: Sequence[str] = (OURS,)) -> list[tuple[Row, Row]]:
    """The rows of one size by one way, and by the first of `ours` that was measured; the smallest first."""
    found = [(r.find(size, by), next((b for way in ours if (b := r.find(size, way))), None)) for size in SIZES]
    return sorted(((a, b) for a, b in found if a and b), key=lambda pair: pair[0].bytes)


def _fed(r: Bytes) -> list[tuple[Row, Row]]:
    """The rows of types alone, and with feedback."""
    return _pairs(r, OURS, (FED,))


def _share(before: Row, after: Row) -> tuple[float, str]:
    """The mean KL of one over that of the other."""
    return quotient(np.array(after.kl), np.array(before.kl))


def _short(rows: Sequence[Bytes]) -> str:
    """For the README: the KL of ours over that of llama.cpp's mix of the same bytes, by model and size.

    With a star where only types alone were measured.
    """
    of = {
        (r.model, Path(r.measured_on.text).stem): {
            b.size: _share(a, b)[1] + ("" if b.by == FED else " *") for a, b in _pairs(r, ours=WRITTEN)
        }
        for r in rows
    }
    sizes = [a.size for a, _ in _pairs(max(rows, key=lambda r: len(_pairs(r))))]
    head = ("bytes of", *(f"{name.split(DITHERED)[0]}, {text}" for name, text in of))
    return table(head, [(size, *(cells.get(size, "-") for cells in of.values())) for size in sizes])


def _table(rows: Sequence[Bytes]) -> str:
    head = (
        "model",
        "text",
        "bytes of",
        "MB",
        "bits",
        "llama.cpp",
        "with importances",
        "predicted",
        "types alone",
        "with feedback",
        "types alone / peer",
        "with feedback / peer",
    )
    cells = []
    for r in rows:
        for peer, ours in _pairs(r):
            plain, fed = r.find(peer.size, PLAIN), r.find(peer.size, FED)
            kl = [f"{x.mean:.4f}" if x else "-" for x in (plain, peer, ours, fed)]
            shares = [_share(peer, x)[1] if x else "-" for x in (ours, fed)]
            on = Path(r.measured_on.text).stem
            mb, bits = f"{ours.bytes / 1e6:.1f}", f"{ours.bits:.2f}"
            cells.append((r.model, on, peer.size, mb, bits, *kl[:2], f"{ours.predicted:.4f}", *kl[2:], *shares))
    return table(head, cells)


def _median(rows: Sequence[Bytes], name: str) -> str:
    of = [r for r in rows if r.model == name]
    ways = {NAMES[FED]: (FED,), NAMES[OURS]: (OURS,)}
    shares = {way: [_share(*pair)[0] for r in of for pair in _pairs(r, ours=ours)] for way, ours in ways.items()}
    return f"{name}: {', '.join(f'{way} {_middle(found)}' for way, found in shares.items() if found)}"


def _middle(shares: Sequence[float]) -> str:
    return f"{np.median(shares):.2f} in the median of {len(shares)} ({min(shares):.2f} to {max(shares):.2f})"


def _feedback(rows: Sequence[Bytes], name: str) -> str:
    """The KL with feedback over that of types alone, how often it stayed, and what it took."""
    pairs = [pair for r in rows if r.model == name for pair in _fed(r)]
    fed = {b.size: b.fed for _, b in pairs if b.fed}
    took = np.median([each.seconds / each.forward for each in fed.values()])
    kept = sum(each.with_it < each.without for each in fed.values())
    return (
        f"{name}: {_middle([_share(*pair)[0] for pair in pairs])}, kept at {kept} of {len(fed)} sizes, "
        f"in the time of {took:.0f} forwards of the text that the model writes for it"
    )


def _predicted(rows: Sequence[Bytes]) -> str:
    """How far the prediction is from what was measured on the texts to report on."""
    return _off([(b, b.mean) for r in rows for _, b in _pairs(r)])


def _predicted_there(rows: Sequence[Bytes]) -> str:
    """The same on the other half of the text that the costs were measured on, for every file once."""
    files = {(r.model, b.size): (b, b.fed.without) for r in rows for _, b in _fed(r) if b.fed}
    return _off(list(files.values()))


def _off(pairs: Sequence[tuple[Row, float]]) -> str:
    """By how much the prediction differs from the KL beside a row, from `BITS` a weight on."""
    off = [row.predicted / kl - 1 for row, kl in pairs if row.bits >= BITS and row.predicted]
    return f"{100 * min(off):+.0f} to {100 * max(off):+.0f} % on {len(off)} files" if off else "not measured"


def _layers(rows: Sequence[Bytes]) -> str:
    """The least that taking a layer out costs, beside what rounding alone costs at a half and a third of the bytes."""
    skipped = SkipDivergence.load(SKIPPED)
    of = [b for r in rows if r.model.startswith(skipped.measured_on.model.name) for _, b in _pairs(r)]
    told = []
    for share in (1 / 2, 1 / 3):
        size = min((b.size for b in of), key=lambda name: abs(next(b.bits for b in of if b.size == name) / 16 - share))
        at = [b for b in of if b.size == size]
        told.append(f"{max(b.mean for b in at):.4f} at {at[0].bits / 16:.0%}")
    kl, layer = float(skipped.kl.min()), int(skipped.kl.argmin())
    return f"{kl:.3f} nats a token (layer {layer}), and rounding the whole model at most {' and '.join(told)}"


def _importances(rows: Sequence[Bytes]) -> str:
    head = ("model", "bytes of", *(f"KL by {by}" for by in (SQUARES, OURS)), f"{OURS} / {SQUARES}")
    cells = [
        (r.calibrated_on.model.name, b.size, f"{a.mean:.4f}", f"{b.mean:.4f}", _share(a, b)[1])
        for r in rows
        for a, b in _pairs(r, SQUARES)
    ]
    return table(head, cells)


if __name__ == "__main__":
    run(main)
