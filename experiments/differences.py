"""Every statement of the chapters that differs from its paper, or puts it right, in one list: docs/differences.md."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
_ITEM = re.compile(r"^- \*\*(Differs|Put right):\*\* (.*\n(?:  .*\n)*)", re.MULTILINE)


def written() -> dict[str, str]:
    """`all`: these statements under chapter and section; `differs` and `put-right`: how many there are of each."""
    parts: list[str] = []
    for path in sorted(HERE.glob("*/README.md")):
        text = path.read_text(encoding="utf-8")
        for section, found in sections(text).items():
            title = " · ".join(filter(None, [text.partition("\n")[0].removeprefix("# "), section]))
            parts += [f"**[{title}](../{path.relative_to(HERE.parent)})**\n", *(f"- {line}" for line in found), ""]
    right = sum(line.startswith("- *Put right:*") for line in parts)
    differs = sum(line.startswith("- ") for line in parts) - right
    return {"all": "\n".join(parts) + "\n", "differs": str(differs), "put-right": str(right)}


def sections(page: str) -> dict[str, list[str]]:
    """The list items of a page that begin with Differs or Put right, each as one line, by the heading above them."""
    plain = re.sub(r"<!-- [^\n]+? -->", "", page)
    found = {}
    for part in re.split(r"^## ", plain, flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        items = [
            " ".join(["*Put right:*"] * (word == "Put right") + item.split()) for word, item in _ITEM.findall(body)
        ]
        if items:
            found["" if heading.startswith("# ") else heading] = items
    return found
