"""A retrieval task in BEIR's files: queries, documents, and which documents answer which query."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lyapunov_prune.arguments import checked
from lyapunov_prune.data.rows import numbered, parsed_line, text_of
from lyapunov_prune.errors import LyapunovPruneError


@dataclass(frozen=True)
class RetrievalTask:
    """Texts by id; `relevant` holds each query's judged documents with their grades, above 0 for an answer.

    `sha256` covers all files.
    """

    name: str
    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, dict[str, int]]
    sha256: str


@checked
def load_retrieval(queries: str | Path, documents: str | Path, judged: str | Path | None = None) -> RetrievalTask:
    """Read a task in BEIR's format.

    `queries` is a JSONL file of `{"_id", "text"}`; `documents` the same, with an optional `title` put before the text;
    `judged` has tab-separated query, document and grade below a header, by default `qrels/test.tsv` beside the queries.
    Queries without an answer are left out, as in BEIR.

    Raises LyapunovPruneError, with the line number, for anything else, for ids that are repeated or missing, and if no
    query has an answer.
    """
    queries, documents = Path(queries), Path(documents)
    judged = queries.parent / "qrels" / "test.tsv" if judged is None else Path(judged)
    digest = hashlib.sha256()
    lines = {path: _lines(path, digest) for path in (queries, documents, judged)}
    asked, texts = (_texts(lines[path]) for path in (queries, documents))
    relevant: dict[str, dict[str, int]] = {}
    for where, line in lines[judged][1:]:  # the first line is the header
        parts = [part.strip() for part in line.split("\t")]
        query, document, grade = parts if len(parts) == 3 else ("", "", "")
        if query not in asked or document not in texts or not grade.lstrip("-").isdigit():
            raise LyapunovPruneError(
                f"{where} is no _id of a query, _id of a document and grade between tabs, {line[:60]!r}; give the "
                "files of one task"
            )
        relevant.setdefault(query, {})[document] = int(grade)
    relevant = {query: grades for query, grades in relevant.items() if max(grades.values()) > 0}
    if not relevant:
        raise LyapunovPruneError(f"{judged} gives no query an answer; give one graded document or more")
    kept = {query: asked[query] for query in asked if query in relevant}
    return RetrievalTask(documents.parent.name or documents.stem, kept, texts, relevant, digest.hexdigest())


def _lines(path: Path, digest: Any) -> list[tuple[str, str]]:
    content = text_of(path, "give QUERIES.jsonl,DOCS.jsonl,QRELS.tsv")
    digest.update(content.encode())
    return numbered(path, content)


def _texts(lines: Sequence[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for where, line in lines:
        try:
            data = parsed_line(line)
            name, parts = str(data["_id"]), [data.get("title") or "", data["text"]]
            text = " ".join(part for part in parts if part).strip()
        except (ValueError, KeyError, TypeError, AttributeError):
            text = ""
        if not text or name in found:
            raise LyapunovPruneError(
                f'{where} is no text with an _id of its own, {line[:60]}; give {{"_id": "…", "text": "…"}} a line'
            )
        found[name] = text
    return found
