"""Cut the texts to report on from parts of C4, of WikiText and of the standard library that no result has read.

    python -m experiments.cut_texts --data FOLDER --out FOLDER

--data holds `c4/c4.jsonl` and `wikitext/wiki.test.raw`. Each text is the last fifth of its file, in whole documents;
the code is modules of the running Python, whose version is part of the file's name. A text that shares a run of 64
tokens with one that a committed result of the built-in model has read is refused, unless the result reports on this
very text. The hashes go into `texts.json`; once they are there, a text that differs from its hash is refused. The
texts themselves are not committed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
from pathlib import Path
from typing import Annotated

import torch
import typer

import lyapunov_prune as lp
from experiments.common import run
from experiments.used_texts import DIGITS, FILE, committed, texts
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.encoding import decode
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.result import MeasuredOn

SHARE = 0.2  # of a file, at its end: every result has read from the beginning of the file or of its second half
MODULES = ("argparse", "difflib", "imaplib", "mailbox", "smtplib", "statistics", "tarfile", "typing", "zipfile")


def main(
    data: Annotated[Path, typer.Option(help="the folder of c4/c4.jsonl and wikitext/wiki.test.raw")],
    out: Annotated[Path, typer.Option(help="the folder that gets the texts")],
) -> None:
    loaded = lp.load("smollm2-135m")
    known = texts()
    for name, text in cuts(data).items():
        digest = hashlib.sha256(text.encode()).hexdigest()
        before = known["report"].setdefault(name, {"sha256": digest, "characters": len(text), "text_hashes": []})
        if before["sha256"] != digest:
            raise LyapunovPruneError(f"{name} is not the text of texts.json; cut it from the same files")
        require_unread(loaded, name, text, before["text_hashes"])
        write_whole(out / name, text)
    write_whole(FILE, json.dumps(known, indent=1, ensure_ascii=False) + "\n")


def cuts(data: Path) -> dict[str, str]:
    """The texts by the name of their file."""
    rows = (data / "c4/c4.jsonl").read_text(encoding="utf-8").splitlines()
    articles = re.split(r"(?m)^(?= = [^=].*[^=] = $)", (data / "wikitext/wiki.test.raw").read_text(encoding="utf-8"))
    found = [importlib.util.find_spec(name) for name in MODULES]
    code = [Path(spec.origin).read_text(encoding="utf-8") for spec in found if spec and spec.origin]
    return {
        "report-c4.txt": "\n\n".join(json.loads(row)["text"] for row in last(rows)),
        "report-wikitext.txt": "".join(last(articles)),
        f"report-code-python-{platform.python_version()}.txt": "\n\n".join(code),
    }


def last(documents: list[str]) -> list[str]:
    """The documents that begin in the last fifth of all characters."""
    whole, start = sum(map(len, documents)), 0
    for place, document in enumerate(documents):
        if start >= (1 - SHARE) * whole:
            return documents[place:]
        start += len(document)
    return []


def require_unread(loaded: lp.models.Decoder, name: str, text: str, reported: list[str]) -> None:
    """Raise LyapunovPruneError for a text of which a committed result of this model has read a run of 64 tokens.

    `reported` are the hashes of windows that results have reported on: those of this very text, cut before.
    """
    ids = torch.tensor([loaded.tokenizer(text, add_special_tokens=False).input_ids])
    batch = lp.TokenBatch(ids, text=name, split="all", bos=False)
    for path, _, record in committed():
        if not record.get("fingerprint") or record["model"]["name"] != "smollm2-135m":
            continue
        if record["text_hash"][:DIGITS] in reported:
            continue
        if shared := batch.shared_with(decode(MeasuredOn, record)):
            raise LyapunovPruneError(f"{name}: {path} has read about {shared} of its tokens; cut another part")


if __name__ == "__main__":
    run(main)
