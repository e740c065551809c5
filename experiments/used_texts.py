"""Which texts were fitted on, chosen on and reported on: `texts.json`, held against every committed result.

`fit` and `choose` have the first digits of the hashes of windows (`MeasuredOn.text_hash`), by text and split: a text
that any decision has looked at, of a set of layers or of a default, is never reported on again. `report` has the texts
of `cut_texts.py` with the windows of them that results have read. `defaults` says on which texts a default was chosen.
`burnt` lists the results that reported on a text of the first two kinds before there was one to report on: their pages
say so. `untold` lists the results that record no text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE = HERE / "texts.json"
DIGITS = 16  # of a hash


def texts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def committed() -> tuple[tuple[str, str, dict[str, Any]], ...]:
    """Every record of a text in a committed result: the result's path, the field that holds it, and the record."""
    return tuple((path, field, record) for path in paths() for field, record in _records(_content(HERE / path)))


def paths() -> list[str]:
    files = [path for end in ("json", "jsonl") for path in HERE.glob(f"*/**/*.{end}")]
    return sorted(path.relative_to(HERE).as_posix() for path in files)


def faults(known: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with the texts of the committed results, a line each; empty if nothing is."""
    known = known or texts()
    used = {h: role for role in ("fit", "choose") for hashes in known[role].values() for h in hashes}
    fresh = {h for text in known["report"].values() for h in text["text_hashes"]}
    found = [
        f"{h} is a text to report on and one to {used[h]} on; it can only be the latter" for h in fresh & set(used)
    ]
    for default in known["defaults"]:
        found += [
            f"{default['default']} was chosen on {name}, which is a text to report on"
            for name in default["chosen_on"]
            if name in known["report"]
        ]
    for path in paths():
        read = [(field, record) for name, field, record in committed() if name == path]
        if not read and path not in known["untold"]:
            found.append(f"{path} records no text; measure it again, with one")
        for field, record in read:
            h = record["text_hash"][:DIGITS]
            if h not in fresh | set(used):
                found.append(f"{path} has read {record['text']} ({h}), which texts.json does not know; give it a role")
            elif h in used and field == "measured_on" and path not in known["burnt"]:
                found.append(f"{path} reports on {record['text']} ({h}), a text to {used[h]} on; report on another")
    return list(dict.fromkeys(found))


def written() -> dict[str, str]:
    """A line for the page of each chapter: how many of its results report on a text that a decision has looked at."""
    known, lines = texts(), {}
    for chapter in sorted({path.split("/")[0] for path in paths()} - {"columns"}):
        own = [path for path in paths() if path.startswith(f"{chapter}/")]
        burnt = [path for path in own if path in known["burnt"]]
        names = sorted(
            {record["text"] for path, field, record in committed() if path in burnt and field == "measured_on"}
        )
        told = []
        if burnt:
            told.append(f"{len(burnt)} report on text that some decision has looked at ({', '.join(names)})")
        if untold := sum(path in known["untold"] for path in own):
            told.append(f"{untold} record no hash of a text")
        lines[chapter] = (
            f"*Files of results in this chapter: {len(own)}. Of them {' and '.join(told)}: development numbers, "
            "perhaps too kind, until they are measured on the [texts to report on](../README.md#texts).*\n"
        )
    return lines


def _content(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def _records(content: Any, field: str = "measured_on") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object with the hash of a text, under the name of the nearest field; of one without, `measured_on`."""
    if isinstance(content, dict):
        if "text_hash" in content:
            yield field, content
        for name, value in content.items():
            yield from _records(value, name)
    elif isinstance(content, list):
        for value in content:
            yield from _records(value, "measured_on" if field not in _OTHERS else field)


_OTHERS = ("calibrated_on", "calibration", "learnt_on", "profiled_on")
