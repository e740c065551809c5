"""Every statement of the chapters that differs from its paper, in one list: docs/differences.md."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
_ITEM = re.compile(r"^- \*\*Differs:\*\* (.*\n(?:  .*\n)*)", re.MULTILINE)


def written() -> dict[str, str]:
    """`all`: what the pages say that differs, under chapter and section; `count`: how many statements these are."""
    parts: list[str] = []
    count = 0
    for path in sorted(HERE.glob("*/README.md")):
        text = path.read_text(encoding="utf-8")
        for section, found in sections(text).items():
            count += len(found)
            title = " · ".join(filter(None, [text.partition("\n")[0].removeprefix("# "), section]))
            parts += [f"**[{title}](../{path.relative_to(HERE.parent)})**\n", *(f"- {line}" for line in found), ""]
    return {"all": "\n".join(parts) + "\n", "count": str(count)}


def sections(page: str) -> dict[str, list[str]]:
    """The list items of a page that begin with Differs, each as one line, by the heading above them."""
    plain = re.sub(r"<!-- [^\n]+? -->", "", page)
    found = {}
    for part in re.split(r"^## ", plain, flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        if items := [" ".join(item.split()) for item in _ITEM.findall(body)]:
            found["" if heading.startswith("# ") else heading] = items
    return found
