"""Options that several commands share, declared once, so that one word means one thing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args

import typer

from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.arguments import Range
from lyapunov_prune.cli import checks, choices
from lyapunov_prune.cli.records import Held
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.format import Quantisation
from lyapunov_prune.export.table import formats_of

if TYPE_CHECKING:  # a usage error must not wait for torch
    from lyapunov_prune.data.batch import Split, TokenBatch
    from lyapunov_prune.models.decoder import Decoder

# The panels of help: what is done, to which model, on which text, and what becomes of it.
what_option = partial(typer.Option, rich_help_panel="What")
model_option = partial(typer.Option, rich_help_panel="Model")
text_option = partial(typer.Option, rich_help_panel="Text")
output_option = partial(typer.Option, rich_help_panel="Output")

MOST_LAYERS = 10**5  # a range of more is a slip of the hand, and takes the memory


def layer_indices(option: str, layers: str) -> list[int]:
    """The layers in a list such as `3,7-9,-1`: numbers, which may count from the end, and ranges with both ends."""
    found: list[int] = []
    for part in map(str.strip, layers.split(",")):
        ends = re.fullmatch(r"(-?\d+)|(\d+)-(\d+)", part)
        first, last = (int(ends[1] or ends[2]), int(ends[1] or ends[3])) if ends else (1, 0)
        if not 0 <= last - first <= MOST_LAYERS:
            raise LyapunovPruneError(
                f"{option} {layers!r} is not a list of layers; write it as 3,7 or 3-7, the smaller number first"
            )
        found.extend(range(first, last + 1))
    return found


LAYERS = Held(partial(layer_indices, "--layers"))
PROTECTED = Held(partial(layer_indices, "--protect"))


def share_of(text: str) -> float:
    """0.25 of 25% or 0.25; raises ValueError for what is no number."""
    number = text.strip().removesuffix("%")
    return float(number) / (1 if number == text.strip() else 100)


def count_or_share(text: str) -> int | float:
    """A whole number, as 7, is an int; a share, as 25% or 0.25, is a float between 0 and 1."""
    with suppress(ValueError):
        if int(text) > 0:
            return int(text)
    with suppress(ValueError):
        if 0 < (share := share_of(text)) < 1:
            return share
    raise typer.BadParameter(f"{text!r} is neither a number above 0, as 7, nor a share below 100%, as 25%")


ABOVE_ZERO = Range(above=True)
# Settings of an option that says how many layers are removed.
counted = {"parser": count_or_share, "metavar": "N|N%"}


def one_of(table: Mapping[str, Any], *more: str) -> dict[str, str]:
    """Settings of an option that takes a name from a table: its help is `more`, then one line for each entry."""
    lines = [f"{name}: {entry.help}" for name, entry in table.items()]
    return {"metavar": "NAME", "help": "\n\n".join([*more, *lines])}


DISK = "disk"  # the value of --device for a model that stays in its files


Device = Annotated[
    str,
    model_option(
        help="cpu, cuda, cuda:1 or mps. auto: the GPU if there is one, else the CPU. spread: layers over all GPUs "
        "(not for training). disk: one layer at a time from the safetensors, for models larger than memory "
        "(profile, rank, prune, compress, eval, explain)."
    ),
]
DType = Annotated[
    choices.DType | None,
    model_option(
        metavar="TYPE",
        help="Type of the weights in memory: float32, bfloat16, float16 or float64. Without a default, that of the "
        "checkpoint.",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """Where a model comes from and where it runs."""

    device: Device = "auto"
    dtype: DType = None

    @property
    def spread(self) -> bool:
        return self.device == "spread"

    @property
    def disk(self) -> bool:
        """Whether the weights stay in their files, from which one layer at a time is read."""
        return self.device == DISK

    def load(self, model: str, *, text_only: bool = False) -> Decoder:
        if self.disk:
            from lyapunov_prune.checkpoints.streamed import load_streamed

            return load_streamed(model, dtype=self.dtype, device="auto")

        from lyapunov_prune.models.loading import load

        return load(model, dtype=self.dtype, device=self.device, text_only=text_only)

    def require_loaded(self, what: str, *, one_place: bool = False) -> None:
        """Raise LyapunovPruneError for a model that is on disk, or not in `one_place`, where `what` needs it."""
        if self.disk or (self.spread and one_place):
            where = "on one device" if one_place and self.spread else "in memory"
            raise LyapunovPruneError(f"{what} needs the model {where}; leave out --device {self.device}")


@dataclass(frozen=True)
class TextOptions:
    """The text, and how it is cut into windows."""

    text: Annotated[
        str,
        checks.TEXT,
        text_option(
            help="builtin (prose), code, a .txt file, a file of rows such as x.jsonl or x.csv:COLUMN, a hub data set "
            "name[:config[:split[:COLUMN]]], or self: text that the model writes itself (in heal, its teacher). Chats "
            "go through the model's chat template."
        ),
    ] = "builtin"
    tokens: Annotated[int, text_option(min=2, help="Number of tokens.")] = 4096
    context: Annotated[int, text_option(min=2, help="Tokens per window.")] = 512

    def as_eval(self, context: int) -> Self:
        """The same text to score on: as much as `eval` takes, at the most, in windows of `context` tokens."""
        return replace(self, tokens=max(context, min(self.tokens, TextOptions.tokens)), context=context)

    def batch(self, loaded: Decoder, split: Split) -> TokenBatch:
        """The windows, of a text or written by the model, then kept as they are written."""
        from lyapunov_prune.cli.jobs import jobs_folder
        from lyapunov_prune.cli.terminal import note
        from lyapunov_prune.data.batch import checked_batch
        from lyapunov_prune.data.sources import SELF
        from lyapunov_prune.data.text import load_text
        from lyapunov_prune.forward.own_text import written_by

        if self.text == SELF:
            return written_by(loaded.model, split, self.tokens, self.context, folder=jobs_folder())
        batch = load_text(self.text, loaded.tokenizer, tokens=self.tokens, context=self.context, split=split)
        if batch.text != self.text:
            note(f"Text: {batch.text}")
        return checked_batch(loaded.structure, batch)


@dataclass(frozen=True)
class Inputs(TextOptions, ModelOptions):
    """Where the model comes from and where it runs, and the text."""


@dataclass(frozen=True)
class RunOptions(Inputs):
    """The same, and where results go."""

    output: Annotated[
        Path | None, checks.RUN, output_option("--output", "-o", help="Folder for results; default: runs/MODEL.")
    ] = None


IN_MEMORY = f"needs the model in memory; leave it out, or --device {DISK}"


def models_here(incomplete: str) -> list[str]:
    """What a shell offers for MODEL: the built-in model, and the folders and .gguf files here that hold one."""
    found = [str(path) for path in Path().glob("*.gguf")]
    found += [str(path.parent) for path in [*Path().glob("*/config.json"), *Path("runs").glob("*/*/config.json")]]
    return [name for name in ["smollm2-135m", *sorted(found)] if name.startswith(incomplete)]


Model = Annotated[
    str,
    checks.MODEL,
    typer.Argument(autocompletion=models_here, help="Hub id, folder, .gguf file, or smollm2-135m (built in)."),
]
Judge = Annotated[
    str | None,
    checks.TEXT,
    text_option(
        help="A second text, named as for --text, which a step must help as well to be kept. Default: self, or builtin "
        "if --text is self."
    ),
]
FailAbove = Annotated[
    float | None,
    Range(1),
    output_option(
        "--fail-above",
        help="Exit code 1 if the perplexity, divided by the dense model's, is above this number, such as 1.1 (by the "
        "upper end of the 95 % interval).",
    ),
]
Seeds = Annotated[int, what_option(min=1, help="Number of random perturbations to average over.")]
Items = Annotated[int | None, what_option("--limit", min=1, help="Number of items of each task; default: all.")]

Method = Annotated[choices.Method, what_option(**one_of(METHODS, "How a matrix is compressed."))]
Sparsity = Annotated[
    str | None,
    what_option(
        metavar="N%|N:M",
        help="Share to remove, of entries or (low rank) of parameters, as 0.5 or 50%. 2:4 keeps two of every four "
        "inputs.",
    ),
]
Bits = Annotated[float | None, what_option(help="Bits per weight (rtn, gptq, awq), or 1.58.")]
Allocation = Annotated[
    str,
    checks.SCHEDULE,
    what_option(
        autocompletion=lambda: list(SCHEDULES),
        **one_of(SCHEDULES, "How the amount is divided over matrices, or the JSON file of an Allocation."),
    ),
]
GroupSize = Annotated[int | None, what_option(help="Number of weights per grid (rtn, gptq, awq); default: a row.")]

Stored = Annotated[
    choices.Stored, output_option("--format", **one_of(formats_of("compress"), "Format of the checkpoint."))
]

Written = Annotated[
    choices.Written, output_option("--format", **one_of(formats_of("export"), "Format of the checkpoint."))
]
Quantize = Annotated[
    Quantisation | None,
    output_option(
        metavar="TYPE", help=f"Type of the matrices in a .gguf file: {', '.join(get_args(Quantisation))}. Default: f16."
    ),
]
Target = Annotated[
    Path, checks.NEW, output_option("--output", "-o", help="Folder for the checkpoint; must be new or empty.")
]
FileTarget = Annotated[
    Path,
    checks.NEW,
    output_option("--output", "-o", help="Folder for the checkpoint, new or empty; or a new file that ends in .gguf."),
]
