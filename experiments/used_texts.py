"""Which texts were fitted on, chosen on and reported on: `texts.json`, held against every committed result.

`fit` has the windows that weights or statistics of a compression were fitted to, `choose` those by which layers, bits
or defaults were chosen, and all that were measured while defaults were still being chosen: the numbers were there to be
seen. A window may be in both; one that is in either is never reported on again. Both hold the first digits of hashes
(`MeasuredOn.text_hash`), by text and split. `report` has the texts of `cut_texts.py` with the windows of them that
results have read. `defaults` says on which texts a default was chosen. `burnt` lists the results that reported on a
text of the first two kinds before there was one to report on: their pages say so. `untold` lists the results that do
not record the text that they report on.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE = HERE / "texts.json"
DIGITS = 12  # of a hash: as many as a line of a result shows
# Fields whose text is not reported on, and the roles that it has; no other field may hold a text that was fitted on.
USED: dict[str, tuple[str, ...]] = {
    "calibrated_on": ("fit", "choose"),
    "calibration": ("fit", "choose"),
    "profiled_on": ("fit", "choose"),
    "learnt_on": ("fit",),
    "chosen_on": ("choose",),
    "pruned_on": ("choose",),
}
_LINE = re.compile(r" of (.+?) \((\w+), ([0-9a-f]{12})\)")  # of MeasuredOn.line()


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
    roles = {role: {h[:DIGITS] for hashes in known[role].values() for h in hashes} for role in ("fit", "choose")}
    used = roles["fit"] | roles["choose"]
    fresh = {h[:DIGITS]: name for name, text in known["report"].items() for h in text["text_hashes"]}
    found = [f"{h} of {fresh[h]} was used to fit or to choose, and is listed to report on" for h in set(fresh) & used]
    for default in known["defaults"]:
        found += [
            f"{default['default']} was chosen on {name}, which is a text to report on"
            for name in default["chosen_on"]
            if name in known["report"]
        ]
    for path in paths():
        read = [(field, record["text"], record["text_hash"][:DIGITS]) for p, field, record in committed() if p == path]
        reported = [(text, h) for field, text, h in read if field not in USED]
        if not reported and path not in known["untold"]:
            found.append(f"{path} records no text that it reports on; measure it again, with one")
        if reported and path in known["untold"]:
            found.append(f"{path} records its text and is listed as one that does not; take it off the list")
        if path in known["burnt"] and not any(h in used for _, h in reported):
            found.append(f"{path} is listed as burnt and reports on no text that was used; take it off the list")
        for field, text, h in read:
            if h not in used and h not in fresh:
                found.append(f"{path} has read {text} ({h}), which texts.json does not know; give it a role")
            elif field in USED and not any(h in roles[role] for role in USED[field]):
                found.append(f"{path} has used {text} ({h}) to {' or to '.join(USED[field])}; list it there")
        for text, h in reported:
            if h in used and path not in known["burnt"]:
                found.append(f"{path} reports on {text} ({h}), a text to fit or to choose on; report on another")
            elif fresh.get(h, text) != text:
                found.append(f"{path} has read {text} ({h}), which is listed as {fresh[h]}; give it its own role")
    return list(dict.fromkeys(found))


def written() -> dict[str, str]:
    """A line for the page of each chapter: how many of its results report on a text that a decision has looked at."""
    known, lines = texts(), {}
    for chapter in sorted({path.split("/")[0] for path in paths()} - {"columns"}):
        own = [path for path in paths() if path.startswith(f"{chapter}/")]
        burnt = [path for path in own if path in known["burnt"]]
        names = sorted({record["text"] for path, field, record in committed() if path in burnt and field not in USED})
        told = []
        if burnt:
            told.append(f"{len(burnt)} report on text that some decision has used ({', '.join(names)})")
        if untold := sum(path in known["untold"] for path in own):
            told.append(f"{untold} do not record the text that they report on")
        lines[chapter] = (
            f"*Of the {len(own)} result files of this chapter, {' and '.join(told)}. These are development numbers, "
            "possibly optimistic, until they are measured on the [texts to report on](../README.md#texts).*\n"
        )
    return lines


def _content(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def _records(content: Any, field: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object with the hash of a text, and every line that shows one, under the name of the nearest field."""
    if isinstance(content, str):
        for text, split, text_hash in _LINE.findall(content):
            yield field, {"text": text, "split": split, "text_hash": text_hash}
    elif isinstance(content, dict):
        if "text_hash" in content:
            yield field, content
        for name, value in content.items():
            yield from _records(value, name.replace(" ", "_"))
    elif isinstance(content, list):
        for value in content:
            yield from _records(value, field)
