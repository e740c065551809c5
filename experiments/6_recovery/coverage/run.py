"""How often a printed 95 % interval holds the mean of the rest of its text.

    python experiments/6_recovery/coverage/run.py --text c4.jsonl --text wiki.test.raw

Losses of windows in the order of a text are measured once: of the model, dense and without one layer, and of two models
of bytes, 2-grams and 3-grams, which can read more windows. Then the text given begins at every window in turn (after
the last comes the first again), some of its windows judge (`judging.ends`), and their interval is held against the mean
of the windows that were not given. Writes coverage.json beside this file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import lyapunov_prune as lp
from experiments.common import Each, Model, read_text, run_command
from experiments.small import rounded
from experiments.statements import bullets, percent, table
from experiments.used_texts import DIGITS
from lyapunov_prune.evaluation.judging import OF, compare, ends
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
FILE = HERE / "coverage.json"
LAYER, WINDOWS, CONTEXT = 10, 60, 64
BYTES = 2048  # of a window
PRIOR = 5  # how often the shorter context counts
Interval = Callable[[np.ndarray], tuple[float, float]]
GIVEN = ((8, 4), (16, 8), (24, 12), (32, 16), (64, 32), (100, 100 // OF))  # windows, and how many of them judge


def main(text: Each = None) -> None:
    loaded = Model().load()
    cut = lp.remove_layers(loaded.model, [LAYER])
    rows = []
    for name in text or []:
        batch = read_text(loaded, name, WINDOWS * CONTEXT, CONTEXT, "all")
        before, after = (lp.perplexity(m, batch, batch_size=12).windows for m in (loaded.model, cut))
        on = batch.measured_on(loaded.model).line()
        rows.append(row(f"{loaded.model.config._name_or_path}, layer {LAYER} gone", on, before, after))
        rows.append(of_bytes(name))
    write_whole(FILE, json.dumps(rounded(rows), indent=1) + "\n")


def row(name: str, on: str, before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    return {"name": name, "measured on": on, "before": before.tolist(), "after": after.tolist()}


def of_bytes(name: str) -> dict[str, Any]:
    """The losses of 2-grams and of 3-grams, counted in the first part of a text, on windows of the second.

    The last quarter is left alone: texts to report on are cut from it.
    """
    rows = Path(name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        rows = "\n\n".join(json.loads(line)["text"] for line in rows.splitlines())
    read = np.frombuffer(rows.encode(), np.uint8).astype(np.int64)
    learnt, scored = np.split(read[: len(read) * 3 // 4], [len(read) * 3 // 8])
    losses = -np.log(grams(learnt, scored))
    windows = losses[:, : losses.shape[1] // BYTES * BYTES].reshape(2, -1, BYTES).mean(2)
    digest = hashlib.sha256(scored.astype(np.uint8).tobytes()).hexdigest()[:DIGITS]
    on = f"{windows.shape[1]} windows of {BYTES} bytes, of {Path(name).name} (evaluation, {digest})"
    return row("3-grams of bytes for 2-grams", on, *windows)


def grams(learnt: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """The probabilities by 2-grams and by 3-grams of every byte but the first two; shorter contexts smooth longer."""
    p = (np.bincount(learnt, minlength=256)[scored[2:]] + 1) / (len(learnt) + 256)
    found = []
    for length in (2, 3):
        of, wanted = (sum(256**k * x[2 - k : len(x) - k] for k in range(length)) for x in (learnt, scored))
        counts, contexts = np.bincount(of, minlength=256**length), np.bincount(of // 256, minlength=256**length)
        p = (counts[wanted] + PRIOR * p) / (contexts[wanted // 256] + PRIOR)
        found.append(p)
    return np.array(found)


def of_blocks(losses: np.ndarray) -> tuple[float, float]:
    found = compare(np.zeros(len(losses)), losses)
    return found.low, found.high


def held(rows: list[dict[str, Any]], share: Callable[..., float]) -> str:
    """Of the interval of the loss and of that of the change, by how many windows are given and judge."""
    head = ["of", "windows of the text", *(f"{judges} of {given}" for given, judges in GIVEN)]
    lines = []
    for r in rows:
        before, after = np.array(r["before"]), np.array(r["after"])
        for what, losses in (("loss", before), ("change", after - before)):
            cells = [percent(share(losses, *size)) if 2 * size[0] <= len(losses) else None for size in GIVEN]
            lines.append([f"{r['name']}, {text_of(r)}: {what}", len(losses), *cells])
    return table(head, lines)


def single(losses: np.ndarray, given: int, judges: int) -> float:
    """The same by Student's t over single windows."""
    return share_held(losses, given, judges, lambda x: stats.t.interval(0.95, len(x) - 1, x.mean(), stats.sem(x)))


def share_held(losses: np.ndarray, given: int, judges: int, interval: Interval = of_blocks) -> float:
    """In which share of places an interval holds the mean of the windows that are not given."""
    count = 0
    for place in range(len(losses)):
        windows, rest = np.split(np.roll(losses, -place), [given])
        low, high = interval(windows[ends(given, judges)])
        count += low <= rest.mean() <= high
    return count / len(losses)


def text_of(r: dict[str, Any]) -> str:
    return str(re.findall(r" of (\S+) \(", r["measured on"])[-1])


def written() -> dict[str, str]:
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        "setting": bullets(*(f"{r['name']}: {r['measured on']}" for r in rows)),
        "held": held(rows, share_held),
        "single": held(rows, single),
    }


if __name__ == "__main__":
    run_command(main, FILE, written)
