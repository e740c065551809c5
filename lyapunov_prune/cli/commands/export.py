"""Write a model in another format."""

from __future__ import annotations

from typing import Annotated, Any

from lyapunov_prune.cli.inputs import format_for
from lyapunov_prune.cli.options import (
    Json,
    Model,
    ModelOptions,
    Quantize,
    Target,
    Written,
    model_option,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import show
from lyapunov_prune.export.table import FORMATS


def export(
    model: Model,
    *,
    format: Written = "plain",
    quantize: Quantize = None,
    text_only: Annotated[
        bool,
        model_option("--text-only", help="Of a multimodal checkpoint the text model alone; what is left out is named."),
    ] = False,
    source: ModelOptions = ModelOptions(),
    output: Target,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Write MODEL as it is in another format: a .gguf file for llama.cpp, or a folder.

    An --output that ends in .gguf means --format gguf: Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 and Phi-3, with
    their tokenizer. What was written is read back and compared, in llama.cpp too where xllamacpp is installed.
    """
    format = format_for(output, format, given)
    options: dict[str, Any] = {} if quantize is None else {"quantize": quantize}
    stored = FORMATS.make(format, **options)
    source.require_one_place("export")
    stored.require_target(output)
    loaded = source.load(model, text_only=text_only)
    show(stored.export(loaded, output), as_json, output)
