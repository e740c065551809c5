"""Plant faults drawn at random, one at a time, and count those that the tests find: `make mutants`.

    python tools/mutants.py [--each 20] [--seed 0]
    python tools/mutants.py --again

Faults are cosmic-ray's: another operator, comparison or number, a condition turned round, a loop that never runs. What
can change no number is left out (`changes_no_number`): faults in wording, in decorators and types, `strict=`, and
`==` for `is`. Of each room of `ROOMS` as many are drawn, by position in the code first. A fault is planted in a copy of
the last commit, whose tests must pass, and the tests of its room are run until one fails; if none does, those that
import the module from other rooms, and the quick ones of the command line. One that all of them pass has survived. What
is done is kept in runs/mutants-COMMIT, and a killed run goes on there. Writes mutants.json beside this file, from which
`make tables` writes docs/mutants.md; why a survivor does no harm is written by hand into harmless.json. `--again`
plants the survivors once more, for the tests that were written for them: what these find is counted apart, since it
says nothing of faults that were not drawn.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import cosmic_ray.plugins
import typer
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec, TestOutcome
from parso.tree import NodeOrLeaf
from scipy import stats

from experiments.statements import percent, table
from lyapunov_prune.progress import track
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.store import Store

REPOSITORY = Path(__file__).resolve().parents[1]
TRIED, HARMLESS = Path(__file__).with_name("mutants.json"), Path(__file__).with_name("harmless.json")
ROOMS = ("profiles", "pruning", "bounds", "compression", "ranking", "data")
PACKAGE = "lyapunov_prune"
LONGEST = 900  # seconds of computing that a run of tests may take: beside them a loop that never ends is found
# Which exception is caught, what a decorator adds, and whether two equal values are one object: wording and types.
_LEFT_OUT = re.compile("ExceptionReplacer|RemoveDecorator|Variable|_Eq_Is$|_NotEq_IsNot$|_Is_Eq$|_IsNot_NotEq$")
# Nodes of the syntax tree (parso's names) in which all is wording, or a type.
_WORDING = {"raise_stmt", "fstring", "decorator", "tfpdef"}
_TEXT = {"string", "fstring", "strings"}


@dataclass(frozen=True)
class Mutant:
    """A fault: `operator` at its `occurrence` in `module`, which stands on `line`."""

    module: str
    operator: str
    occurrence: int
    line: int

    @property
    def room(self) -> str:
        return Path(self.module).parent.name


@dataclass(frozen=True)
class Tried:
    """A mutant, the changed line before and after, and whether a test failed: at once, or one written since.

    `by` is the test that failed; empty where none is named, as when the tests cannot be collected, or never end.
    """

    mutant: Mutant
    before: str
    after: str
    died: bool
    died_since: bool = False
    by: str = ""

    @property
    def said(self) -> str:
        """What harmless.json names it by."""
        return f"{self.mutant.module}: {self.before} → {self.after}"


def mutants(repository: Path, module: Path) -> list[Mutant]:
    """Every fault that can be planted in `module`, a path in the repository."""
    nodes = list(ast_nodes(get_ast_from_path(repository / module)))
    found = []
    for name in sorted(cosmic_ray.plugins.operator_names()):
        if not _LEFT_OUT.search(name):
            operator = cosmic_ray.plugins.get_operator(name)()
            # An occurrence is counted among all, those that are left out as well.
            places = [(node, begin) for node in nodes for begin, _ in operator.mutation_positions(node)]
            found += [
                Mutant(str(module), name, i, line)
                for i, (node, (line, _)) in enumerate(places)
                if not changes_no_number(node)
            ]
    return found


def changes_no_number(node: NodeOrLeaf) -> bool:
    """Whether a fault at this node of the syntax tree is one of wording or of types, by where it stands.

    In a `raise` and its message, an f-string, a decorator or an annotation; `|` outside functions, between types;
    `strict=` of a zip, of what has one length already; which of two texts is shown, one empty or an f-string. Stars and
    strokes of signatures and calls, for which cosmic-ray puts operators, are none: what is planted is no Python.
    """
    sign = node.get_code().strip()
    if sign == "|" and node.search_ancestor("funcdef", "lambdef") is None:
        return True
    if sign in ("*", "**", "/") and node.parent.type not in ("term", "power"):
        return True
    within = node
    while within.parent is not None:
        above = within.parent
        a_type = within is (above.children[1] if above.type == "annassign" else getattr(above, "annotation", None))
        strict = within.type == "argument" and within.children[0].get_code().strip() == "strict"
        shown = within.type == "test" and _shown(within.children[0], within.children[-1])
        if within.type in _WORDING or a_type or strict or shown:
            return True
        within = above
    return False


def _shown(*texts: NodeOrLeaf) -> bool:
    """Whether these are texts that are put together for somebody to read, as far as can be told."""
    made = any(text.type == "fstring" or text.get_code().strip() == '""' for text in texts)
    return made and all(text.type in _TEXT for text in texts)


def of_room(repository: Path, room: str) -> list[Mutant]:
    files = sorted((repository / PACKAGE / room).glob("[!_]*.py"))
    return [mutant for file in files for mutant in mutants(repository, file.relative_to(repository))]


def drawn(every: Iterable[Mutant], count: int, seed: str) -> list[Mutant]:
    """`count` of them, no two on one line: the line first, so that an operator with many stand-ins counts once.

    More of them begin with fewer, so that a run can be made longer.
    """
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in every:
        lines.setdefault((mutant.module, mutant.line), []).append(mutant)
    order = sorted(lines)
    random.Random(seed).shuffle(order)
    return [random.Random(f"{seed} {line}").choice(lines[line]) for line in order[:count]]


def plant(mutant: Mutant, folder: Path) -> Tried:
    """Run its tests in `folder`, a copy of the repository, with the fault in it; the copy is whole again afterwards."""
    # A busy machine finds no fault: the time of the clock is only for what waits and does not compute.
    start = f"prlimit --cpu={LONGEST} env -C {folder} PYTHONPATH={folder} {sys.executable} -m pytest -x -q "
    fault = MutationSpec(
        str(folder / mutant.module), mutant.operator, mutant.occurrence, (mutant.line, 0), (mutant.line, 1)
    )
    for tests in tests_of(mutant, folder):
        found = mutate_and_test([fault], start + shlex.join(["-p", "no:cacheprovider", *tests]), 8 * LONGEST)
        if found.diff is None or found.test_outcome not in (TestOutcome.KILLED, TestOutcome.SURVIVED):
            raise RuntimeError(f"{mutant} was not tried: {found.output}")
        if died := found.test_outcome == TestOutcome.KILLED:
            break
    changed = [line for line in found.diff.splitlines() if line[:1] in "-+" and line[:3] not in ("---", "+++")]
    before, after = (" ".join(line[1:].strip() for line in changed if line[0] == sign) for sign in "-+")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", found.output or "", re.MULTILINE)
    return Tried(mutant, before, after, died, by=failed[1] if failed else "")


def tests_of(mutant: Mutant, folder: Path) -> list[list[str]]:
    """Those of its room, its own and what names the module first; then those elsewhere, without the slow ones.

    Elsewhere is what names the module (if no test does, the tests of those that import it), and the command line.
    """
    room, name = Path("tests") / mutant.room, mutant.module.removesuffix(".py").replace("/", ".")
    first = [room / f"test_{Path(mutant.module).name}"]
    naming = [file.relative_to(folder) for file in _naming(name, folder / "tests")]
    if not naming and not (folder / first[0]).exists():
        users = [file.relative_to(folder / PACKAGE) for file in _naming(name, folder / PACKAGE)]
        naming = [Path("tests") / file.with_name(f"test_{file.name}") for file in users]
    # To pytest a file that is not there is an error, which would pass for a fault that was found.
    asked = [file for file in (*first, *naming, room, Path("tests/cli")) if (folder / file).exists()]
    own, others = ([str(f) for f in asked if (room in (f, f.parent)) == inside] for inside in (True, False))
    return [own, *([[*others, "-m", "not slow"]] if others else [])]


def _naming(name: str, folder: Path) -> list[Path]:
    files = sorted(folder.glob("*/[!_]*.py"))
    return [file for file in files if re.search(rf"\b{re.escape(name)}\b", file.read_text(encoding="utf-8"))]


def main(
    each: Annotated[int, typer.Option(help="faults in each room")] = 20,
    seed: Annotated[int, typer.Option(help="that they are drawn by")] = 0,
    again: Annotated[bool, typer.Option("--again", help="plant only those that survived, in the last commit")] = False,
) -> None:
    commit = _git("rev-parse", "HEAD")
    with tempfile.TemporaryDirectory() as copy:
        _git("clone", "--quiet", str(REPOSITORY), copy)
        if again:
            about, tried = read()
            rows = [t if t.died else replace(t, died_since=plant(t.mutant, Path(copy)).died) for t in tried]
            about |= {"again": commit}
        else:
            about = {"commit": commit, "seed": seed}
            rooms = [drawn(of_room(Path(copy), room), each, f"{seed} {room}") for room in ROOMS]
            chosen = [mutant for one_each in zip(*rooms, strict=True) for mutant in one_each]
            with Store(REPOSITORY / "runs" / f"mutants-{commit[:12]}", "mutants", about) as store:
                rows = [_stored(store, mutant, Path(copy)) for mutant in track(chosen, "faults")]
    write_whole(TRIED, json.dumps({**about, "tried": [asdict(row) for row in rows]}, indent=1, ensure_ascii=False))


def _stored(store: Store, mutant: Mutant, folder: Path) -> Tried:
    key = json.dumps(asdict(mutant))
    if key not in store:
        store.add(key, asdict(plant(mutant, folder)))
        print(store[key])
    return _tried(store[key])


def _tried(row: dict[str, Any]) -> Tried:
    return Tried(**row | {"mutant": Mutant(**row["mutant"])})


def read() -> tuple[dict[str, Any], list[Tried]]:
    """What was tried, after what it was."""
    content = json.loads(TRIED.read_text(encoding="utf-8"))
    return content, [_tried(row) for row in content.pop("tried")]


def harmless() -> dict[str, str]:
    """Why a survivor, as it is `said`, changes nothing that matters."""
    found: dict[str, str] = json.loads(HARMLESS.read_text(encoding="utf-8"))
    return found


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return found.stdout.strip()


def written() -> dict[str, str]:
    """The faults of each room and how many of them a test found, and those that none found."""
    about, tried = read()
    known = harmless()
    lived = [t for t in tried if not t.died]
    rows = []
    for room in (*ROOMS, "all"):
        here, left = ([t for t in some if room in ("all", t.mutant.room)] for some in (tried, lived))
        found, since = len(here) - len(left), sum(t.died_since for t in left)
        spared = sum(t.said in known for t in left)
        can = len(here) - spared
        low, high = stats.binomtest(found, max(1, can)).proportion_ci(method="wilson")
        share = f"{percent(found / max(1, can))} ({percent(low)} to {percent(high)})"
        rows.append((room, len(here), spared, found, share, since, can - found - since))
    survivors = [
        (f"`{t.mutant.module}`", f"`{t.before}`", f"`{t.after or '(nothing)'}`", _fate(t, known)) for t in lived
    ]
    headers = ("room", "planted", "harmless", "found", "of those that can be", "found since", "not found")
    again = f", and again at {about['again'][:12]}" if "again" in about else ""
    return {
        "setting": f"Commit {about['commit'][:12]}, seed {about['seed']}{again}.\n",
        "score": table(headers, rows),
        "survivors": table(("module", "line", "with the fault", "what of it"), survivors),
    }


def _fate(survivor: Tried, known: dict[str, str]) -> str:
    return known.get(survivor.said, "a test was written that finds it" if survivor.died_since else "**not found**")


if __name__ == "__main__":
    typer.run(main)
