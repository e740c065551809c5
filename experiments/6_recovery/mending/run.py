"""What closing the gaps without training takes back: perplexity of a removal, cut and mended, on several texts.

    python experiments/6_recovery/mending/run.py [--model MODEL] --text builtin --text A.txt --text B.jsonl

Layers are chosen, and gaps mended, on one half of a text; perplexity is measured on the other. Where one run of layers
goes, the ways of `experiments.gap_maps` close the gap too. Writes MODEL-TEXT.json beside this file, one a text; what
all of them say goes into README.md by `make tables`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer

import lyapunov_prune as lp
from experiments.common import Inputs, on_each_text
from experiments.compressions import told
from experiments.gap_maps import WAYS, Hook, closed, one_run, read_gap
from experiments.statements import bullets, counted, percent, ratio, short, table
from lyapunov_prune.forward.reading import read
from lyapunov_prune.mending.mend import fit_mends, mapped
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.results.result import MeasuredOn, Result, encode
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
CRITERIA = ("bi", "angular")
COUNTS = (2, 4, 7)


@dataclass(frozen=True)
class Losses:
    """The mean loss of each window, nats a token."""

    windows: np.ndarray


@dataclass(frozen=True)
class Removal:
    """Layers that went by a criterion, the windows' losses without them and mended, and the map of each gap.

    `others` are the losses by the ways of `gap_maps`, of one run of layers; without those that its layers cannot take.
    """

    criterion: str
    removed: tuple[int, ...]
    cut: Losses
    mended: Losses
    maps: tuple[str, ...]
    others: dict[str, Losses] = field(default_factory=dict)


@dataclass(frozen=True)
class MendedOnOneText(Result):
    dense: Losses
    removals: tuple[Removal, ...]
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn

    def to_frame(self) -> pd.DataFrame:
        rows = [
            {
                "criterion": r.criterion,
                "removed": len(r.removed),
                "layers": ", ".join(map(str, r.removed)),
                "cut": float(np.exp((r.cut.windows - self.dense.windows).mean())),
                "mended": float(np.exp((r.mended.windows - self.dense.windows).mean())),
                "maps": ", ".join(r.maps),
            }
            for r in self.removals
        ]
        return pd.DataFrame(rows)

    def headline(self) -> str:
        return f"{self.measured_on.line()}; chosen and mended on {self.calibrated_on.line()}"


def measure(given: Inputs) -> MendedOnOneText:
    model = given.loaded.model
    origins = given.evaluation.measured_on(model), given.calibration.measured_on(model)
    folder = given.jobs / f"mending-{given.evaluation.text_hash[:16]}"
    with Store(folder, "mending", {"texts": encode(origins)}, resume=True) as store:
        if "dense" not in store:
            store.add("dense", {"windows": losses(given, (), nullcontext())})
        keys = [f"{criterion}-{count}" for criterion in CRITERIA for count in COUNTS]
        for criterion in CRITERIA:
            for count in COUNTS:
                if (key := f"{criterion}-{count}") not in store:
                    store.add(key, _removal(given, criterion, count))
        for key in keys:
            if f"others {key}" not in store:
                store.add(f"others {key}", _others(given, store[key]["removed"]))
        rows = [(store[key], store[f"others {key}"]) for key in keys]
        dense = Losses(np.array(store["dense"]["windows"]))
    removals = [
        Removal(
            r["criterion"],
            tuple(r["removed"]),
            Losses(np.array(r["cut"])),
            Losses(np.array(r["mended"])),
            tuple(r["maps"]),
            {way: Losses(np.array(windows)) for way, windows in others.items()},
        )
        for r, others in rows
    ]
    return MendedOnOneText(dense, tuple(removals), *origins)


def _removal(given: Inputs, criterion: str, count: int) -> dict[str, Any]:
    ranking = lp.rank(given.loaded.model, given.calibration, criterion=criterion, remove=count)
    removed = ranking.plan(count).remove
    mends, report = fit_mends(given.loaded.model, removed, given.calibration)
    return {
        "criterion": criterion,
        "removed": list(removed),
        "cut": losses(given, removed, nullcontext()),
        "mended": losses(given, removed, mapped(given.loaded.structure.layers, mends)),
        "maps": [gap.forms[gap.chosen] for gap in report.gaps],
    }


def _others(given: Inputs, removed: Sequence[int]) -> dict[str, list[float]]:
    """Each way is given all calibration windows: it holds none out, having nothing to choose."""
    if not one_run(removed):
        return {}
    gap = read_gap(read(given.loaded.model, given.calibration), removed)
    hooks: dict[str, Hook | None] = {way: closed(way, gap) for way in WAYS}
    return {way: losses(given, removed, hooked(after=[hook])) for way, hook in hooks.items() if hook is not None}


@torch.no_grad()
def losses(given: Inputs, removed: Sequence[int], mended: AbstractContextManager[None]) -> list[float]:
    """Of every evaluation window, the layers passed over and what closes the gaps in its place by hooks."""
    reading = read(given.loaded.model, given.evaluation)
    prefix, scorer = reading.prefix, reading.scorer
    found: list[float] = []
    with prefix.without(removed) if removed else nullcontext(), mended:
        for ids in reading.windows(1):
            found += scorer(ids)[0]
    return found


def written() -> dict[str, str]:
    results = [MendedOnOneText.load(path) for path in sorted(HERE.glob("*.json"))]
    parts = {"setting": setting, "mended": mended, "others": others, "verdict": verdict, "summary": summary}
    return {name: part(results) for name, part in parts.items()}


def setting(results: list[MendedOnOneText]) -> str:
    return bullets(*(f"{r.headline()}; dense perplexity {ratio(r.dense.windows)}" for r in results))


def _name(result: MendedOnOneText) -> str:
    return f"{result.measured_on.model.name}, {Path(result.measured_on.text).stem}"


def mended(results: list[MendedOnOneText]) -> str:
    """Over the dense perplexity: cut, mended, and mended over cut with its interval."""
    rows = []
    for r in results:
        for removal in r.removals:
            cut, after = (each.windows - r.dense.windows for each in (removal.cut, removal.mended))
            rows.append(
                (
                    _name(r),
                    len(removal.removed),
                    f"`{removal.criterion}`",
                    float(np.exp(cut.mean())),
                    ratio(after),
                    ratio(after - cut),
                    ", ".join(removal.maps),
                )
            )
    head = ("model, text", "removed", "by", "cut / dense", "mended / dense", "mended / cut", "map of each gap")
    return table(head, rows)


def others(results: list[MendedOnOneText]) -> str:
    """Where one run of layers went: over the dense perplexity by every way, and mended over each other way."""
    rows = []
    for r in results:
        for removal in (x for x in r.removals if x.others):
            cells = [
                f"{ratio(found.windows - r.dense.windows)}; {ratio(removal.mended.windows - found.windows)}"
                if (found := removal.others.get(way))
                else "—"
                for way in WAYS
            ]
            layers = f"{removal.removed[0]} to {removal.removed[-1]}"
            rows.append((_name(r), layers, ratio(removal.mended.windows - r.dense.windows), *cells))
    return table(("model, text", "removed", "mended / dense", *(f"{way} / dense; mended / it" for way in WAYS)), rows)


def summary(results: list[MendedOnOneText]) -> str:
    """For docs/removing-layers.md."""
    pairs = [(r, x, told(x.mended, x.cut)) for r in results for x in r.removals]
    models = counted(len({r.measured_on.model.name for r in results}), "model")
    texts = counted(len({Path(r.measured_on.text).stem for r in results}), "text")
    worse = [
        f"{_name(r)}, {len(x.removed)} layers by `{x.criterion}`, {ratio(x.mended.windows - x.cut.windows)} times the "
        "perplexity of the cut"
        for r, x, word in pairs
        if word == "worse"
    ]
    better = sum(word == "better" for *_, word in pairs)
    harmed = f", and harmed in {len(worse)} ({'; '.join(worse)})" if worse else ""
    return f"It helped in {better} of {len(pairs)} removals on {models} and {texts}{harmed}.\n"


def verdict(results: list[MendedOnOneText]) -> str:
    lines = []
    for name in dict.fromkeys(r.measured_on.model.name for r in results):
        mine = [r for r in results if r.measured_on.model.name == name]
        said = Counter(told(x.mended, x.cut) for r in mine for x in r.removals)
        tally = ", ".join(f"{word} {n}" for word, n in sorted(said.items()))
        lines.append(
            f"{name}, {counted(len(mine), 'text')}: mended against cut, over {sum(said.values())} removals: {tally}."
        )
        for count in COUNTS:
            shares = [
                float((x.cut.windows - x.mended.windows).mean() / (x.cut.windows - r.dense.windows).mean())
                for r in mine
                for x in r.removals
                if len(x.removed) == count
            ]
            lines.append(
                f"{name}, {count} layers removed: of the loss that the cut adds, mending takes back "
                f"{percent(min(shares))} to {percent(max(shares))}, median {percent(float(np.median(shares)))}."
            )
        for way in WAYS:
            beside = Counter(told(x.mended, x.others[way]) for r in mine for x in r.removals if way in x.others)
            if beside:
                tally = ", ".join(f"{word} {n}" for word, n in sorted(beside.items()))
                lines.append(
                    f"{name}: mended against {way}, {counted(sum(beside.values()), 'run')} of layers: {tally}."
                )
        maps = Counter(form for r in mine for x in r.removals for form in x.maps)
        lines.append(
            f"{name}: of {sum(maps.values())} gaps the held-out loss chose "
            f"{', '.join(f'{form} in {short(n)}' for form, n in maps.most_common())}."
        )
    return bullets(*lines)


main = on_each_text(measure, HERE)

if __name__ == "__main__":
    typer.run(main)
