"""Write a model in another format."""

from __future__ import annotations

from typing import Annotated, Any

from lyapunov_prune.cli.inputs import format_for
from lyapunov_prune.cli.options import FileTarget, Model, ModelOptions, Quantize, Written, model_option
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import follow, show
from lyapunov_prune.export.table import FORMATS


def export(
    model: Model,
    *,
    format: Written = "plain",
    quantize: Quantize = None,
    text_only: Annotated[
        bool,
        model_option(
            "--text-only", help="Write only the text model of a multimodal checkpoint; names what is left out."
        ),
    ] = False,
    output: FileTarget,
    given: Given = Given(),
) -> None:
    """Write MODEL unchanged in another format: a .gguf file for llama.cpp, or a folder.

    If --output ends in .gguf, the format is gguf: for Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 and Phi-3, with
    their tokenizer. The file is read back and compared, also in llama.cpp if xllamacpp is installed.
    """
    format = format_for(output, format, given)
    if format != "gguf":
        given.refuse("applies to a GGUF file; end --output in .gguf, or leave it out", "quantize")
    options: dict[str, Any] = {} if quantize is None else {"quantize": quantize}
    stored = FORMATS.make(format, **options)
    stored.require_target(output)
    loaded = ModelOptions("cpu").load(model, text_only=text_only)
    show(stored.export(loaded, output), output)
    if not stored.loads:
        follow("")
