"""Every statement of the experiments that differs from its paper, in one list: docs/differences.md."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
_SAID = "**Differs:**"
_MARKED = re.compile(r"<!-- (?P<name>[\w. -]+) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)


def written() -> dict[str, str]:
    """`all`: what the READMEs say between markers, under each experiment's title; `count`: how many they are."""
    parts: list[str] = []
    count = 0
    for path in sorted(HERE.glob("*/*/README.md")):
        text = path.read_text(encoding="utf-8")
        if found := differing(text, path.parent):
            title = text.partition("\n")[0].removeprefix("# ")
            count += len(found)
            parts += [f"**[{path.parent.name}](../{path.relative_to(HERE.parent)})**: {title}\n", *found, ""]
    return {"all": "\n".join(parts) + "\n", "count": str(count)}


def differing(readme: str, folder: Path) -> list[str]:
    """List items; what was measured on another model than the built-in one begins with its name."""
    found = []
    for marked in _MARKED.finditer(readme):
        model = marked["name"].partition(" ")[0]
        on = f"{model}: " if (folder / model).is_dir() else ""
        lines = (line.lstrip("- ") for line in marked["text"].splitlines())
        found += [f"- {on}{line.removeprefix(_SAID).strip()}" for line in lines if line.startswith(_SAID)]
    return found
