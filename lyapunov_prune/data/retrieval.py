"""Queries, documents and which of these answer which: a retrieval task in the files of BEIR."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lyapunov_prune.arguments import checked
from lyapunov_prune.data.lines import numbered, parsed_line, text_of
from lyapunov_prune.errors import LyapunovPruneError


@dataclass(frozen=True)
class RetrievalTask:
    """Texts by their ids; `relevant` holds the grade of the judged documents of every query, above 0 an answer.

    `sha256` is of the bytes of all files.
    """

    name: str
    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, dict[str, int]]
    sha256: str


@checked
def load_retrieval(queries: str | Path, documents: str | Path, judged: str | Path | None = None) -> RetrievalTask:
    """Read a task as BEIR writes it.

    `queries`: a JSONL file of `{"_id", "text"}`; `documents`: of `{"_id", "text"}`, with a `title` that stands before
    the text; `judged`: tab-separated query, document and grade under one line of names, by default `qrels/test.tsv`
    beside the queries. Queries of which no document is an answer are left out, as BEIR leaves them out.

    Raises LyapunovPruneError with the number of the line for anything else, for an id that stands twice or nowhere,
    and where no query has an answer.
    """
    queries, documents = Path(queries), Path(documents)
    judged = queries.parent / "qrels" / "test.tsv" if judged is None else Path(judged)
    digest = hashlib.sha256()
    lines = {path: _lines(path, digest) for path in (queries, documents, judged)}
    asked, texts = (_texts(lines[path]) for path in (queries, documents))
    relevant: dict[str, dict[str, int]] = {}
    for where, line in lines[judged][1:]:  # the first names the columns
        parts = line.split("\t")
        if len(parts) != 3 or not parts[2].strip().lstrip("-").isdigit():
            raise LyapunovPruneError(f"{where} is no query, document and grade between tabs; give three a line")
        query, document, grade = parts[0].strip(), parts[1].strip(), int(parts[2])
        if query not in asked or document not in texts:
            missing = f"query {query!r}" if query not in asked else f"document {document!r}"
            raise LyapunovPruneError(f"{where} names {missing}, which is no _id of a line; give the files of one task")
        relevant.setdefault(query, {})[document] = grade
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
        if not text:
            raise LyapunovPruneError(f'{where} is no text with an id; give {{"_id": "…", "text": "…"}} a line')
        if name in found:
            raise LyapunovPruneError(f"{where} has the _id {name!r} of an earlier line; give each its own")
        found[name] = text
    return found
