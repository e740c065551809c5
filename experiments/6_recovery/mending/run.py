"""What closing the gaps without training takes back: perplexity of a removal, cut and mended, on several texts.

    python experiments/6_recovery/mending/run.py [--model MODEL] --text builtin --text A.txt --text B.jsonl

Layers are chosen, and gaps mended, on one half of a text; perplexity is measured on the other. Where one run of layers
goes, the ways of `experiments.gap_maps` close the gap too. Writes MODEL-TEXT.json beside this file, one a text; what
all of them say goes into README.md by `make tables`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lyapunov_prune as lp
from experiments.common import Inputs, on_each_text, run_command
from experiments.compressions import ALIKE, told
from experiments.gap_maps import WAYS, Hook, closed, one_run, read_gap
from experiments.statements import bullets, counted, percent, ratio, table
from lyapunov_prune.forward.reading import read
from lyapunov_prune.mending.mend import fit_mends, mapped
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.result import MeasuredOn, Result
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

    def headline(self) -> str:
        return f"{self.measured_on.line()}; chosen and mended on {self.calibrated_on.line()}"


def measure(given: Inputs) -> MendedOnOneText:
    model = given.loaded.model
    origins = given.evaluation.measured_on(model), given.calibration.measured_on(model)
    folder = given.jobs / f"mending-{given.evaluation.text_hash[:16]}"
    with Store(folder, "mending", {"texts": encode(origins)}) as store:
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
    gap = read_gap(read(given.loaded, given.calibration), removed)
    hooks: dict[str, Hook | None] = {way: closed(way, gap) for way in WAYS}
    return {way: losses(given, removed, hooked(after=[hook])) for way, hook in hooks.items() if hook is not None}


@torch.no_grad()
def losses(given: Inputs, removed: Sequence[int], mended: AbstractContextManager[None]) -> list[float]:
    """Of every evaluation window, the layers passed over and what closes the gaps in its place by hooks."""
    reading = read(given.loaded, given.evaluation)
    prefix, scorer = reading.prefix, reading.scorer
    found: list[float] = []
    with prefix.without(removed) if removed else nullcontext(), mended:
        for ids in reading.windows(1):
            found += scorer(ids)[0]
    return found


def written() -> dict[str, str]:
    results = [MendedOnOneText.load(path) for path in sorted(HERE.glob("*.json"))]
    words = [told(x.mended, x.cut) for r in results for x in once(r)]
    parts = {"setting": setting, "mended": mended, "others": others, "back": back, "beside": beside}
    return {name: part(results) for name, part in parts.items()} | {
        "removals": str(len(words)),
        "helped": str(words.count("better")),
        "harmed": str(words.count("worse")),
        "models": counted(len({r.measured_on.model.name for r in results}), "model"),
        "texts": counted(len({Path(r.measured_on.text).stem for r in results}), "text"),
    }


def setting(results: list[MendedOnOneText]) -> str:
    return bullets(*(f"{r.headline()}; dense perplexity {ratio(r.dense.windows)}" for r in results))


def once(result: MendedOnOneText) -> list[Removal]:
    """Its removals, each set of layers once: two criteria may choose the same."""
    return list({removal.removed: removal for removal in reversed(result.removals)}.values())[::-1]


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
        for removal in (x for x in once(r) if x.others):
            cells = [
                f"{ratio(found.windows - r.dense.windows)}; {ratio(removal.mended.windows - found.windows)}"
                if (found := removal.others.get(way))
                else "—"
                for way in WAYS
            ]
            layers = f"{removal.removed[0]} to {removal.removed[-1]}"
            rows.append((_name(r), layers, ratio(removal.mended.windows - r.dense.windows), *cells))
    return table(("model, text", "removed", "mended / dense", *(f"{way} / dense; mended / it" for way in WAYS)), rows)


def _of_model(results: list[MendedOnOneText]) -> list[tuple[str, list[MendedOnOneText]]]:
    names = dict.fromkeys(r.measured_on.model.name for r in results)
    return [(name, [r for r in results if r.measured_on.model.name == name]) for name in names]


def _tally(words: Sequence[str]) -> list[object]:
    return [words.count(word) for word in ("better", ALIKE, "worse")]


def back(results: list[MendedOnOneText]) -> str:
    """How often mending helped, and the share of the added loss that it takes back: least, median, most."""
    rows: list[list[object]] = []
    for name, mine in _of_model(results):
        for count in COUNTS:
            some = [(r, x) for r in mine for x in once(r) if len(x.removed) == count]
            shares = [
                float((x.cut.windows - x.mended.windows).mean() / (x.cut.windows - r.dense.windows).mean())
                for r, x in some
            ]
            taken = [percent(share) for share in (min(shares), float(np.median(shares)), max(shares))]
            rows.append([name, count, *_tally([told(x.mended, x.cut) for _, x in some]), *taken])
    return table(("model", "removed", "better", ALIKE, "worse", "taken back: least", "median", "most"), rows)


def beside(results: list[MendedOnOneText]) -> str:
    """Mended against each other way, over runs of layers."""
    rows: list[list[object]] = []
    for name, mine in _of_model(results):
        for way in WAYS:
            words = [told(x.mended, x.others[way]) for r in mine for x in once(r) if way in x.others]
            rows += [[name, way, *_tally(words)]] if words else []
    return table(("model", "mended against", "better", ALIKE, "worse"), rows)


main = on_each_text(measure, HERE)

if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
