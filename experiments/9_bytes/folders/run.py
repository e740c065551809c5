"""The same bytes in a folder for vLLM: one scheme for all, bits by layer, and schemes by cost.

    python experiments/9_bytes/folders/run.py [--model MODEL] [--text FILE]

Bytes are those of the matrices of the layers with their scales: of `rtn` in one scheme for all, and of `bits-kl` of
`3_compression/bits_by_layer`, whose layers have the widths that it chose at 4.5 bits. Schemes by cost get as many.
Without --text the KL is measured on the half of the built-in text that chooses. Writes MODEL-TEXT.json.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from experiments.common import BUILT_IN, Each, Model, committed, plain, read_text, run_command
from experiments.statements import bullets, quotient, table
from lyapunov_prune.budget.cost import TensorCost, costs
from lyapunov_prune.budget.schemes import Schemes
from lyapunov_prune.budget.spend import chosen_types
from lyapunov_prune.compression.grids import stepped
from lyapunov_prune.export.packed import Scheme
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.predictions.divergence import kl_by_window
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
BITS = HERE.parents[1] / "3_compression" / "bits_by_layer"
GROUP = 64  # of bits by layer, which rows of 576 numbers are whole groups of
SAME = (Scheme(4, GROUP),)
BY_LAYER, COST = "bits by layer", "by cost"
Values = Callable[[TensorCost, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """A model of the size of `bytes_of`, made `by`: KL(dense ‖ made) of every window, nats a token."""

    bytes_of: str
    by: str
    bytes: int
    predicted: float | None
    kl: tuple[float, ...]


@dataclass(frozen=True)
class Folders(Result):
    rows: tuple[Row, ...]
    commit: str
    calibrated_on: MeasuredOn
    measured_on: MeasuredOn


def main(
    model: Model = Model(f"{BUILT_IN}-dithered-0"), text: Each = None, windows: int = 24, tokens: int = 4096
) -> None:
    commit, dense = committed(), model.load()
    reading = read(dense, read_text(dense, "builtin", windows * 256, 256))
    storage = Schemes(dense)
    known = [t for t in costs(reading, storage) if len(t.kinds) > 1]
    judges = [
        read(dense, read_text(dense, each, tokens, 256, "evaluation" if each == "builtin" else "all"))
        for each in text or ("builtin",)
    ]
    found = [Folders((), commit, reading.measured_on(), judge.measured_on()) for judge in judges]
    for row, values in rows(dense, model, storage, known):
        small = copy.deepcopy(dense.model)
        with torch.no_grad():
            for t in known:
                p = small.get_parameter(t.name)
                p.copy_(values(t, p))
        for n, judge in enumerate(judges):
            kl = kl_by_window(judge, read(wrap(small), judge.batch))[0]
            found[n] = replace(found[n], rows=(*found[n].rows, replace(row, kl=tuple(kl.tolist()))))
            found[n].save(HERE / f"{plain(model.name)}-{Path(judge.batch.text).stem}.json")
            print(row.bytes_of, row.by, row.bytes, row.predicted, kl.mean(), judge.batch.text, flush=True)


def rows(dense: Decoder, model: Model, storage: Schemes, known: list[TensorCost]) -> Iterator[tuple[Row, Values]]:
    """What is compared, without its KL, and what becomes of a matrix."""
    shapes = {t.name: tuple(dense.model.get_parameter(t.name).shape) for t in known}
    peers = {scheme.name: dict.fromkeys(shapes, scheme) for scheme in SAME}
    if (kept := model.folder(BITS) / "bits.json").exists():
        widths: dict[int | None, int] = dict(enumerate(chosen_by_layer(kept)))
        peers[BY_LAYER] = {name: Scheme(widths[dense.structure.layer_of(name)], GROUP) for name in shapes}
    for name, schemes in peers.items():
        size = sum(storage.size_in(schemes[t.name], shapes[t.name]) for t in known)
        yield Row(name, "rtn", size, None, ()), lambda t, W, of=schemes: nearest(W, of[t.name])
        if name != BY_LAYER:
            chosen = {t.name: t.kinds.index(schemes[t.name]) for t in known}
            predicted = float(sum(t.cost[chosen[t.name]] for t in known))
            yield (
                Row(name, "rtn, fitted steps", size, predicted, ()),
                lambda t, W, of=chosen: fitted(storage, t, W, of[t.name]),
            )
        pick = {t.name: int(k) for t, k in zip(known, chosen_types(known, size), strict=True)}
        taken = int(sum(t.bytes[pick[t.name]] for t in known))
        predicted = float(sum(t.cost[pick[t.name]] for t in known))
        yield Row(name, COST, taken, predicted, ()), lambda t, W, of=pick: fitted(storage, t, W, of[t.name])


def chosen_by_layer(file: Path) -> tuple[int, ...]:
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return next(tuple(row["widths"]) for row in rows if (row["schedule"], row["budget"]) == ("bits-kl", 4.5))


def nearest(W: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """`rtn`: the widest steps."""
    if scheme.bits == 16:
        return W
    return stepped(W, scheme.bits, scheme.group_size, symmetric=True).nearest(W.double()).to(W)


def fitted(storage: Schemes, t: TensorCost, W: torch.Tensor, k: int) -> torch.Tensor:
    return torch.from_numpy(storage.rounded(W.numpy(), t.kinds[k], t.importance))


def written(folder: Path = HERE) -> dict[str, str]:
    found = [Folders.load(path) for path in sorted(folder.glob("*.json"))]
    lines = []
    for r in found:
        first = {row.bytes_of: row for row in reversed(r.rows)}
        for row in r.rows:
            share = quotient(np.array(row.kl), np.array(first[row.bytes_of].kl))[1] if row.by != "rtn" else None
            name, told = r.measured_on.model.name, None if row.predicted is None else f"{row.predicted:.4f}"
            lines.append((name, row.bytes_of, f"{row.bytes / 1e6:.1f}", row.by, told, f"{np.mean(row.kl):.4f}", share))
    head = ("model", "bytes of", "MB of the layers", "made by", "predicted", "KL, nats a token", "/ rtn")
    settings = [f"commit {r.commit}; costs on {r.calibrated_on.line()}; KL on {r.measured_on.line()}" for r in found]
    by_cost = next(row for row in found[0].rows if row.by == COST)
    share = quotient(np.array(by_cost.kl), np.array(found[0].rows[0].kl))[1]
    return {"table": table(head, lines), "setting": bullets(*settings), "share": share}


if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
