"""What the model cards of all checkpoints share: the front matter, and names as text that is nothing but text."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import ModelCardData

from lyapunov_prune.errors import printable
from lyapunov_prune.models.loading import HUB_ID


def front_matter(*tags: str, source: str = "") -> str:
    """The card's YAML. `source` is the model that this one was made from; it becomes a link if it is of a hub."""
    # A hub id makes a link on the hub; a local path would make the card invalid there.
    is_hub = source.count("/") == 1 and HUB_ID.fullmatch(source) and not Path(source).exists()
    data = ModelCardData(library_name="transformers", base_model=source if is_hub else None, tags=list(tags))
    return f"---\n{data.to_yaml(original_order=['library_name', 'base_model', 'tags'])}\n---"


def as_text(line: str) -> str:
    """`line`, with names from anywhere in it, as Markdown that shows it: no link, code, HTML or line of its own."""
    return re.sub(r"[\\`*\[\]<>|&]", r"\\\g<0>", printable(line))
