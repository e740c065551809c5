"""The model card (README.md) of a checkpoint, and escaping of names in it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData, metadata_load
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.beside import source_folder
from lyapunov_prune.errors import printable
from lyapunov_prune.models.cache import BUILTIN
from lyapunov_prune.models.compact import MODULE
from lyapunov_prune.models.decoder import is_wrapped
from lyapunov_prune.models.engines import short_cuts_of
from lyapunov_prune.models.gguf import BUILTIN_CARD
from lyapunov_prune.models.left_out import left_out
from lyapunov_prune.models.names import HUB_ID
from lyapunov_prune.models.pictures import looks_at_images
from lyapunov_prune.models.quantised import stored_quantisation
from lyapunov_prune.models.size import Size, model_size
from lyapunov_prune.models.wrappers import loading_class
from lyapunov_prune.results.worth import Worth

CARD = "README.md"
_OWN_TAG = "lyapunov-prune"
_LICENCE = ("license", "license_name", "license_link")
_LLAMA_CPP = """lyapunov-prune export path/to/this/folder -o model.gguf  # of the families that llama.cpp knows
llama-cli -m model.gguf
echo "FROM ./model.gguf" > Modelfile && ollama create my-model -f Modelfile"""
_MODULE_IS_RUN = f"""This runs `{MODULE}`, which lies in this folder and imports torch and transformers alone: read it
first. lyapunov-prune needs no flag. It runs its own copy of that module, and no code from a folder. Engines that bring
their own model code, such as llama.cpp, do not know these layers and cannot load this checkpoint."""


def write_card(
    folder: Path,
    title: str,
    about: str,
    model: PreTrainedModel,
    sections: Mapping[str, str] | None = None,
    *,
    tags: Collection[str] = (),
    worth: Worth | None = None,
) -> None:
    """Write the model card of the checkpoint in `folder`.

    `title` is plain text; `about` and the values of `sections` (by heading) are Markdown with names escaped by
    `as_text`. `worth` is what the model was measured to be worth, also for the hub to draw (`model-index`). The card
    names the class of `model` and what it was loaded without, and takes base model and licence from the model named in
    its config. For a compact checkpoint it says that loading runs the module in the folder, and that other engines
    cannot load it.
    """
    compact, loader, reads_text = (folder / MODULE).is_file(), loading_class(model).__name__, not looks_at_images(model)
    left = left_out(model)
    lines = [] if left is None else [f"- {as_text(line)}." for line in left.lines()]
    sections = {**(sections or {}), **({"Left out": "\n".join(lines)} if lines else {})}
    option = ", trust_remote_code=True" if compact else ""
    tokenizer = '\ntokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")' if reads_text else ""
    more = "".join(f"## {heading}\n\n{text}\n\n" for heading, text in sections.items())
    card = f"""{_front_matter((_OWN_TAG, *tags), model, title, worth)}
# {as_text(title)}

{about}

{_sized(folder, model)}

{"" if worth is None else _measured(worth)}## Load

```python
from transformers import {loader}{", AutoTokenizer" if reads_text else ""}

model = {loader}.from_pretrained("path/to/this/folder"{option}){tokenizer}
```

{_MODULE_IS_RUN if compact else "No custom code is needed."}

{_run(folder) if reads_text and not compact else ""}{more}Licence and intended use are those of the original model.
"""
    (folder / CARD).write_text(card, encoding="utf-8")


def _sized(folder: Path, model: PreTrainedModel) -> str:
    """The size of the checkpoint in `folder`, which holds `model`."""
    files = list(folder.glob("*.safetensors"))
    size = Size(sum(file.stat().st_size for file in files), model.num_parameters()) if files else model_size(model)
    return f"Size of the weights: {size.bytes:,} bytes ({size.told()})."


def _measured(worth: Worth) -> str:
    speed = f"\n\n{as_text(worth.speed)}." if worth.speed else ""
    own = "" if worth.perplexity is None else f"; {worth.perplexity:.4g} on its own"
    return f"## Measured\n\n{as_text(worth.told().rstrip('.'))}{own}. {worth.ratio.means()}{speed}\n\n"


def _run(folder: Path) -> str:
    """The lines that run the text model in `folder`, a plain or packed checkpoint; empty if there are none."""
    served = (folder / "config.json").is_file() and not any(
        "vLLM" in row.engine for row, _ in short_cuts_of(str(folder))
    )
    ways = ["vllm serve path/to/this/folder"] if served else []
    ways += [_LLAMA_CPP] if stored_quantisation(folder) is None else []
    lines = "\n\n".join(ways)
    return f"## Run\n\n```\n{lines}\n```\n\n" if ways else ""


def as_text(line: str) -> str:
    """`line` escaped as Markdown that shows it literally: names in it make no link, code, HTML or new line."""
    return re.sub(r"[\\`*\[\]<>|&]", r"\\\g<0>", printable(line))


def _front_matter(tags: Collection[str], model: PreTrainedModel, title: str, worth: Worth | None) -> str:
    source = model.config._name_or_path
    told: Mapping[str, object] = BUILTIN_CARD if source == BUILTIN else _told_by(source_folder(model))
    # A hub id becomes a link; the hub would reject a card with a local path.
    is_hub = source.count("/") == 1 and HUB_ID.fullmatch(source) and not Path(source).exists()
    source_tags = told.get("tags")
    made_here = source == BUILTIN or (isinstance(source_tags, list) and _OWN_TAG in source_tags)
    values: dict[str, Any] = {
        "library_name": "transformers",
        "base_model": source if is_hub else _text(told, "base_model") if made_here else None,
        "pipeline_tag": _task(model) or _text(told, "pipeline_tag"),
        **{key: _text(told, key) for key in _LICENCE},
        "tags": list(tags),
    }
    if worth is not None:  # which becomes the `model-index`
        values |= {"model_name": printable(title), "eval_results": _results(worth)}
    # ModelCardData omits entries that are None.
    return f"---\n{ModelCardData(**values).to_yaml(original_order=[*values])}\n---"


def _results(worth: Worth) -> list[EvalResult]:
    """The measurements as the hub draws them."""
    told = {"perplexity": worth.perplexity, "perplexity, times that of the dense model": worth.ratio.value}
    text = printable(worth.text)
    return [
        EvalResult("text-generation", text, text, "perplexity", round(value, 6), metric_name=name)
        for name, value in told.items()
        if value is not None and math.isfinite(value)  # the hub's JSON has no others
    ]


def _told_by(folder: Path | None) -> dict[str, object]:
    """The front matter of the card in a source folder; empty if there is none that can be read."""
    card = folder / CARD if folder else None
    if card is None or not card.is_file():
        return {}
    try:
        told = metadata_load(card)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return told if isinstance(told, dict) else {}


def _text(told: Mapping[str, object], key: str) -> str | None:
    value = told.get(key)
    return printable(value) if isinstance(value, str) else None


def _task(model: PreTrainedModel) -> str | None:
    """The hub's name for the task of `model`; None for multimodal models, which have several."""
    if looks_at_images(model):
        return "image-classification"
    return None if is_wrapped(model) else "text-generation"
