"""The model card (README.md) of every checkpoint, and names in it as text that is nothing but text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from lyapunov_prune.errors import printable
from lyapunov_prune.models.classifiers import looks_at_images
from lyapunov_prune.models.compact import MODULE
from lyapunov_prune.models.hub import HUB_ID
from lyapunov_prune.models.left_out import left_out
from lyapunov_prune.models.wrappers import loading_class

_MODULE_IS_RUN = f"""This runs `{MODULE}`, which lies in this folder and imports torch and transformers alone: read it
first. lyapunov-prune needs no flag. It runs its own copy of that module, and no code from a folder."""


def write_card(
    folder: Path,
    title: str,
    about: str,
    model: PreTrainedModel,
    sections: Mapping[str, str] | None = None,
    *,
    tags: Collection[str] = (),
    source: str = "",
) -> None:
    """Write the card of the checkpoint in `folder`.

    `title` is text; `about` and what stands under the headings of `sections` are Markdown, in which names went
    through `as_text`. `model` is what the checkpoint holds: its class and what it was loaded without are named.
    `source` is the model that this one was made from, which becomes a link if it is of a hub. Where the folder holds
    the module of a compact checkpoint, the card says that loading runs it.
    """
    compact, loader, reads_text = (folder / MODULE).is_file(), loading_class(model).__name__, not looks_at_images(model)
    left = left_out(model)
    lines = [] if left is None else [f"- {as_text(line)}." for line in left.lines()]
    sections = {**(sections or {}), **({"Left out": "\n".join(lines)} if lines else {})}
    option = ", trust_remote_code=True" if compact else ""
    tokenizer = '\ntokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")' if reads_text else ""
    more = "".join(f"## {heading}\n\n{text}\n\n" for heading, text in sections.items())
    card = f"""{_front_matter(("lyapunov-prune", *tags), source)}
# {as_text(title)}

{about}

## Load

```python
from transformers import {loader}{", AutoTokenizer" if reads_text else ""}

model = {loader}.from_pretrained("path/to/this/folder"{option}){tokenizer}
```

{_MODULE_IS_RUN if compact else "No custom code is needed."}

{more}Licence and intended use are those of the original model.
"""
    (folder / "README.md").write_text(card, encoding="utf-8")


def as_text(line: str) -> str:
    """`line`, with names from anywhere in it, as Markdown that shows it: no link, code, HTML or line of its own."""
    return re.sub(r"[\\`*\[\]<>|&]", r"\\\g<0>", printable(line))


def _front_matter(tags: Collection[str], source: str) -> str:
    # A hub id makes a link on the hub; a local path would make the card invalid there.
    is_hub = source.count("/") == 1 and HUB_ID.fullmatch(source) and not Path(source).exists()
    data = ModelCardData(library_name="transformers", base_model=source if is_hub else None, tags=list(tags))
    return f"---\n{data.to_yaml(original_order=['library_name', 'base_model', 'tags'])}\n---"
