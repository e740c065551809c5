"""One self-contained HTML page about a run: it reads the run's JSON files and needs no network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.profiles.influence import InfluenceProfile
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.report.glossary import Glossary
from lyapunov_prune.report.layer_sections import LAYERS
from lyapunov_prune.report.model_sections import MODELS
from lyapunov_prune.report.ranking import ranking_figure
from lyapunov_prune.results.files import parsed, write_whole
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MISSING, Result
from lyapunov_prune.results.wording import number

SECTIONS = (*LAYERS, *MODELS)
SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
# Nothing is fetched, nothing is sent, and of scripts only this one runs: whatever the names in a result hold is text.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)


@dataclass
class Table:
    """A result as HTML: the rows that matter, what it was measured on, and the whole frame where that is more."""

    brief: Markup
    on: str
    whole: Markup | None
    rows: int


@dataclass
class Shown:
    """A section as the template draws it; `words` are those that it is the first to use."""

    title: str
    about: str
    answer: list[str]
    pictures: list[Markup]
    tables: list[Table]
    leads: bool = False
    words: list[tuple[str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.about, *self.answer, *(table.on for table in self.tables)])


def require_readable(run: Path, replaced: Collection[str] = ()) -> None:
    """Raise LyapunovPruneError for a file in `run` that `write_report` cannot read, but for those to be `replaced`."""
    kinds: dict[Path, type[Result]] = {path: section.kind for section in SECTIONS for path in section.paths(run)}
    kinds |= dict.fromkeys(run.glob("plan*.json"), PruningPlan) | dict.fromkeys(run.glob(f"*/{PROVENANCE}"), Provenance)
    for path, kind in kinds.items():
        if path.relative_to(run).as_posix() not in replaced:
            kind.load(path)


def load_result(path: Path) -> Result:
    """The result in a file that a command wrote, whatever its kind. Raises LyapunovPruneError for any other file."""
    from lyapunov_prune.budget.spent import Spent

    kinds: list[type[Result]] = [section.kind for section in SECTIONS]
    kinds += [PruningPlan, Provenance, Spent]
    try:
        named = parsed(path.read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        named = None
    kind = next((kind for kind in kinds if kind.__name__ == named), None)
    if kind is None:
        raise LyapunovPruneError(f"{path} holds no result that this program prints; give a .json file of a run")
    return kind.load(path)


def write_report(run: str | Path, output: str | Path | None = None) -> Path:
    """Write `report.html` and `figures/*.svg` from the results in the folder `run`, into `output` or else into `run`.

    The page opens with the answer of the first result that compares models before and after, or else of the first
    result, then shows those that compare, the choice of layers, and the rest. Raises LyapunovPruneError when the folder
    holds no result.
    """
    run = Path(run)
    target = run if output is None else Path(output)
    plans = {path.stem.removeprefix("plan-"): PruningPlan.load(path) for path in sorted(run.glob("plan*.json"))}
    written = {path.parent.name: Provenance.load(path) for path in sorted(run.glob(f"*/{PROVENANCE}"))}
    read: dict[Path, Any] = {}  # several sections draw one file
    drawn: dict[str, str] = {}
    sections = list(_sections(run, plans, read, drawn))
    sections += [_gate(name, provenance) for name, provenance in written.items()]
    if not sections:
        raise LyapunovPruneError(f"{run} holds no results; give a folder that profile, demo or eval wrote")
    for name, svg in drawn.items():
        write_whole(target / "figures" / f"{name}.svg", svg)
    return write_whole(target / "report.html", _page(run.name, sections))


def _page(name: str, sections: list[Shown]) -> str:
    leading = [section for section in sections if section.leads]
    others = [section for section in sections if not section.leads]
    card = (leading or others)[0]
    glossary = Glossary()
    card.words = glossary.first_in(card.text)
    for section in leading:
        section.words = section.words or glossary.first_in(section.text)
    for section in others:
        section.words = section.words or glossary.first_in(section.text)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        name=name,
        policy=POLICY,
        script=Markup(SCRIPT),
        card=card,
        leading=leading,
        others=others,
    )


def _sections(
    run: Path, plans: dict[str, PruningPlan], read: dict[Path, Any], drawn: dict[str, str]
) -> Iterator[Shown]:
    """The sections of what `run` holds, in their order; fills `read` with the results and `drawn` with the figures."""
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
            # The parts of a result, each of its type, may not go together.
            with reported(f"{path} cannot be shown", "make it again", Exception):
                pictures = {f"{name}{ending}": picture for name, picture in section.draw(result).items()}
                yield _shown(title, section.words, pictures, result, leads=section.leads)
            drawn |= pictures
            if section.kind in (LayerProfile, InfluenceProfile) and scored and "ranking" not in drawn:
                pictures = {"ranking": ranking_figure(scored)}
                drawn |= pictures
                words = "The number is a layer's rank: 1 would be removed first. Filled layers are removed by the plan."
                tables = [_table(plan) for plan in scored.values()]
                yield Shown("Rankings and plans", words, [], [Markup(pictures["ranking"])], tables)


def _gate(name: str, provenance: Provenance) -> Shown:
    made = f"The {provenance.format} checkpoint {name}/ was written after these checks passed on its files."
    return _shown("Removal check", made, {}, provenance.gate)


def _shown(title: str, about: str, pictures: dict[str, str], result: Result, leads: bool = False) -> Shown:
    svgs = [Markup(svg) for svg in pictures.values()]
    answer, after = result.answer(), result.next_step()
    return Shown(title, about, [*answer, *([after] if after else [])], svgs, [_table(result, answer)], leads)


def _table(result: Result, told: Collection[str] = ()) -> Table:
    """With what was measured, but for the lines that are `told` already."""
    frame = result.to_frame()
    brief, whole = _html(result.brief()), _html(frame)
    lines = [line for line in result.headline().split("\n") if line not in told]
    return Table(brief, "\n".join(lines), None if whole == brief else whole, len(frame))


def _html(frame: pd.DataFrame) -> Markup:
    """`frame` as a table, the columns of words left-aligned and whole."""
    words = [Markup("" if dtype.kind in "iufb" else ' class="words"') for dtype in frame.dtypes]
    head = Markup("").join(Markup("<th{}>{}</th>").format(*of) for of in zip(words, frame.columns, strict=True))
    rows = [
        Markup("").join(Markup("<td{}>{}</td>").format(of, _cell(value)) for of, value in zip(words, row, strict=True))
        for row in frame.astype(object).where(frame.notna(), None).itertuples(index=False)
    ]
    body = Markup("\n").join(Markup("<tr>{}</tr>").format(row) for row in rows)
    return Markup("<table><thead><tr>{}</tr></thead><tbody>\n{}\n</tbody></table>").format(head, body)


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    return number(value) if isinstance(value, float) else str(value)
