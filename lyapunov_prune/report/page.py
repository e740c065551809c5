"""One self-contained HTML page about a run: it reads the run's JSON files and needs no network."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lyapunov_prune.errors import LyapunovPruneError, first_line
from lyapunov_prune.profiles.influence import InfluenceProfile
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.report.layer_sections import LAYERS
from lyapunov_prune.report.model_sections import MODELS
from lyapunov_prune.report.questions import POLICY, SCRIPT, questions
from lyapunov_prune.report.ranking import ranking_figure
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import Result

SECTIONS = (*LAYERS, *MODELS)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th { cursor: pointer; } th[data-order=rising]::after { content: " ↑"; } th[data-order=falling]::after { content: " ↓"; }
#strip span { display: inline-block; min-width: 1.7rem; margin: 1px; text-align: center; border: 1px solid #bbb;
  font-size: .8rem; } #strip .gone { background: #d55e00; border-color: #d55e00; color: #fff; }
#ask dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } #ask dd { margin: 0; }
#ask label { margin-right: 1.5rem; } dt { color: #666; } code { background: #f3f3f3; padding: .15rem .4rem; }
p.on { color: #666; font-size: .85rem; white-space: pre-line; } details { margin: .6rem 0; }
"""


def require_readable(run: Path, replaced: Collection[str] = ()) -> None:
    """Raise LyapunovPruneError for a file in `run` that `write_report` cannot read, but for those to be `replaced`."""
    kinds: dict[Path, type[Result]] = {path: section.kind for section in SECTIONS for path in section.paths(run)}
    kinds |= dict.fromkeys(run.glob("plan*.json"), PruningPlan) | dict.fromkeys(run.glob(f"*/{PROVENANCE}"), Provenance)
    for path, kind in kinds.items():
        if path.relative_to(run).as_posix() not in replaced:
            kind.load(path)


def write_report(run: str | Path) -> Path:
    """Write `report.html` and `figures/*.svg` into the folder `run` from the results it holds.

    Raises LyapunovPruneError when the folder holds none.
    """
    run = Path(run)
    body: list[str] = []
    drawn: dict[str, str] = {}
    read: dict[Path, Any] = {}  # several sections draw one file
    plans = {path.stem.removeprefix("plan-"): PruningPlan.load(path) for path in sorted(run.glob("plan*.json"))}
    scored = {name: plan for name, plan in plans.items() if len(plan.scores)}
    for section in SECTIONS:
        for path in section.paths(run):
            if path not in read:
                read[path] = section.kind.load(path)
            result = section.part(read[path])
            if result is None:
                continue
            title, ending = section.title, ""
            if path.parent != run:
                title, ending = f"{title}: {path.parent.name}/", f"-{path.parent.name}"
            with _showing(path):
                pictures = {f"{name}{ending}": picture for name, picture in section.draw(result).items()}
                body.append(_section(title, section.words, pictures, result))
            drawn |= pictures
            if section.kind in (LayerProfile, InfluenceProfile) and scored and "ranking" not in drawn:
                pictures = {"ranking": ranking_figure(scored)}
                drawn |= pictures
                words = "The number is a layer's rank: 1 would be removed first. Filled layers are removed by the plan."
                body.append(_section("Rankings and plans", words, pictures, *scored.values()))
    for path in sorted(run.glob(f"*/{PROVENANCE}")):
        provenance = Provenance.load(path)
        made = f"The {provenance.format} checkpoint {path.parent.name}/"
        words = f"{made} was written after these checks passed on its files."
        body.append(_section("Removal gate", words, {}, provenance.gate))
    if not body:
        raise LyapunovPruneError(f"{run} holds no results; give a folder that profile, demo or eval wrote")
    for name, svg in drawn.items():
        write_whole(run / "figures" / f"{name}.svg", svg)
    asked = questions(read.values())
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>lyapunov-prune: {html.escape(run.name)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>lyapunov-prune: {html.escape(run.name)}</h1>{asked}{''.join(body)}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )
    return write_whole(run / "report.html", page)


@contextmanager
def _showing(path: Path) -> Iterator[None]:
    """Raises LyapunovPruneError where the parts of a result, each of its type, do not go together."""
    try:
        yield
    except LyapunovPruneError:
        raise
    except Exception as error:  # of whatever the file holds
        raise LyapunovPruneError(f"{path} cannot be shown ({first_line(error)}); make it again") from None


def _section(title: str, words: str, pictures: dict[str, str], *results: Result) -> str:
    parts = [f"<h2>{html.escape(title)}</h2><p>{html.escape(words)}</p>"]
    parts += [f"<figure>{svg}</figure>" for svg in pictures.values()]
    for result in results:
        if result.headline():
            parts.append(f'<p class="on">{html.escape(result.headline())}</p>')
        summary, table = _table(result.summary()), _table(result.to_frame())
        if summary != table:
            parts.append(summary)
        parts.append(f"<details><summary>numbers</summary>{table}</details>" if pictures else table)
    return "".join(parts)


def _table(frame: pd.DataFrame) -> str:
    return frame.to_html(index=False, border=0, float_format=lambda x: f"{x:.4g}")
