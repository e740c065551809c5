"""Options that several commands share, declared once, so that one word means one thing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.arguments import Range
from lyapunov_prune.cli import choices
from lyapunov_prune.cli.records import Given
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.format import Quantisation
from lyapunov_prune.export.table import formats_of
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.ranking import counts
from lyapunov_prune.ranking.table import CRITERIA, default_criterion

if TYPE_CHECKING:  # a usage error must not wait for torch
    from lyapunov_prune.data.batch import TokenBatch
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.ranking.ranking import Ranking

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
        ends = re.fullmatch(r"(\d+)-(\d+)", part)
        if ends is None and re.fullmatch(r"-?\d+", part) is None:
            raise LyapunovPruneError(f"{option} {layers!r} is not a list of layers; write it as 3,7 or 3-7")
        first, last = map(int, ends.groups()) if ends else (int(part), int(part))
        if first > last or last - first > MOST_LAYERS:
            raise LyapunovPruneError(f"{option} {part} is not a range of layers; give the smaller number first")
        found.extend(range(first, last + 1))
    return found


def count_or_share(text: str) -> int | float:
    """A whole number, as 7, is an int; a share, as 25% or 0.25, is a float between 0 and 1."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
        if 0 < share < 1:
            return share
    raise typer.BadParameter(f"{text!r} is neither a number, as 7, nor a share below 100%, as 25%")


ABOVE_ZERO = Range(above=True)
# Settings of an option that says how many layers are removed.
counted = {"parser": count_or_share, "metavar": "N|N%"}


def one_of(table: Mapping[str, Any], *more: str) -> str:
    """Help of an option that takes a name from a table: `more`, then one line for each entry."""
    return "\n\n".join([*more, *(f"{name}: {entry.help}" for name, entry in table.items())])


SPREAD, DISK = "spread", "disk"  # values of --device for models that are not on one


Device = Annotated[
    str,
    model_option(
        help="cpu, cuda, cuda:1 or mps. auto: the GPU if there is one, else the CPU. spread: layers on GPUs, in memory "
        "and on disk (not for training). disk: one layer at a time from the safetensors, for models larger than memory "
        "(profile, rank, prune, compress, eval, explain)."
    ),
]
DType = Annotated[
    choices.DType | None,
    model_option(help="Type of the weights in memory; if there is no default, that of the checkpoint."),
]


@dataclass(frozen=True)
class ModelOptions:
    """Where a model comes from and where it runs."""

    device: Device = "auto"
    dtype: DType = None

    @property
    def spread(self) -> bool:
        return self.device == SPREAD

    @property
    def disk(self) -> bool:
        """Whether the weights stay in their files, from which one layer at a time is read."""
        return self.device == DISK

    def load(self, model: str, *, text_only: bool = False, stack: choices.Stack | None = None) -> Decoder:
        if self.disk:
            from lyapunov_prune.checkpoints.streamed import load_streamed

            return load_streamed(model, dtype=self.dtype, device="auto")

        from lyapunov_prune.models.loading import load

        return load(
            model,
            dtype=self.dtype,
            device="auto" if self.spread else self.device,
            device_map="auto" if self.spread else None,
            text_only=text_only,
            stack=stack,
        )

    def require_one_place(self, what: str) -> None:
        """Raise LyapunovPruneError for a model that is spread or on disk: `what` needs it on one device."""
        if self.spread:
            raise LyapunovPruneError(f"{what} needs the model on one device; leave out --device {SPREAD}")
        self.require_loaded(what)

    def require_loaded(self, what: str) -> None:
        """Raise LyapunovPruneError for a model that is read layer by layer: `what` needs it in memory."""
        if self.disk:
            raise LyapunovPruneError(f"{what} needs the model in memory; leave out --device {DISK}")


@dataclass(frozen=True)
class TextOptions:
    """The text, and how it is cut into windows."""

    text: Annotated[
        str,
        text_option(
            help="builtin, a .txt file, a file of rows such as x.jsonl or x.csv:COLUMN, a hub data set "
            "name[:config[:split[:COLUMN]]], or self: text that the (dense) model writes, the default of prune --mend. "
            "Chats go through the model's chat template. For a ViT or DeiT (joint, prune): mnist-5k, a folder of class "
            "folders, or an .npz."
        ),
    ] = "builtin"
    tokens: Annotated[int, text_option(min=2, help="Number of tokens.")] = 4096
    context: Annotated[int, text_option(min=2, help="Tokens per window.")] = 512

    @property
    def images(self) -> bool:
        """Whether `text` names images, for a classifier of images."""
        return self.text == "mnist-5k" or self.text.endswith(".npz") or Path(self.text).is_dir()

    def as_eval(self, context: int) -> TextOptions:
        """The same text to score on: as much as `eval` takes, at the most, in windows of `context` tokens."""
        return replace(self, tokens=max(context, min(self.tokens, TextOptions.tokens)), context=context)

    def load(
        self,
        loaded: Decoder,
        split: choices.Split,
        *,
        folder: Path | None = None,
    ) -> TokenBatch:
        """The windows, of a text or written by the model, then kept in `folder` as they are written."""
        from lyapunov_prune.cli.terminal import note
        from lyapunov_prune.data.batch import checked_batch
        from lyapunov_prune.data.text import load_text
        from lyapunov_prune.forward.own_text import SELF, written_by

        if self.text == SELF:
            return written_by(loaded.model, split, self.tokens, self.context, folder=folder)
        batch = load_text(
            self.text,
            loaded.tokenizer,
            tokens=self.tokens,
            context=self.context,
            split=split,
        )
        if batch.text != self.text:
            note(f"Text: {batch.text}")
        return checked_batch(loaded.structure, batch)


IN_MEMORY = f"needs the model in memory; leave it out, or --device {DISK}"
Model = Annotated[str, typer.Argument(help="Hub id, folder, .gguf file (see cache), or smollm2-135m (built in).")]
Format = Annotated[
    choices.Format,
    output_option(help=one_of(formats_of("prune"), "Format of the checkpoint.")),
]
Mend = Annotated[
    bool, what_option("--mend", help="Fit linear maps on the text that replace what was removed, without training.")
]
Judge = Annotated[
    str | None,
    text_option(
        help="A second text that decides whether a step helped; named as --text. Default: for --mend and --what width "
        "self, or builtin if --text is self; for heal every eighth window of its text."
    ),
]
Stack = Annotated[
    choices.Stack | None,
    model_option("--stack", help="For an encoder-decoder, such as T5: take the layers of its encoder or decoder."),
]
Seeds = Annotated[int, what_option(min=1, help="Number of random perturbations to average over.")]
Items = Annotated[int | None, what_option("--limit", min=1, help="Number of items of each task; default: all.")]

Criterion = Annotated[
    choices.Criterion | None,
    what_option(
        help=one_of(
            CRITERIA,
            "How layers are chosen. Default: best if --remove gives the number of whole layers and the model is in "
            "memory, reap for experts, otherwise bi.",
        )
    ),
]
Protect = Annotated[str | None, what_option(help="Layers to keep, as 0-2,-1 (negative numbers count from the end).")]
Search = Annotated[
    float | None,
    what_option(
        help="Number of forward passes over the check windows that --criterion best may use. Default: depends on the "
        "number of layers, for 7 of 30 it is 20, and 40 with --mend."
    ),
]
What = Annotated[
    counts.What,
    what_option(
        help="layers: whole layers. attention, mlp: that part of a layer (by "
        f"{', '.join(name for name, c in CRITERIA.items() if 'mlp' in c.parts)}). activation: only with prune "
        "--layers. width: hidden channels of all blocks or experts (prune). experts: the same number per layer (by "
        f"{', '.join(name for name, c in CRITERIA.items() if 'experts' in c.parts)}). layers,width and "
        "layers,experts: both, shared by measured loss (prune --remove 20% of the parameters of the layers). In a "
        "plain checkpoint, removing attention, mlp or activation saves no time."
    ),
]
Reduction = Annotated[
    choices.Reduction | None,
    what_option(help=one_of(REDUCTIONS, "With --what activation: what replaces it.")),
]
MaxKL = Annotated[
    float | None,
    ABOVE_ZERO,
    what_option(
        "--max-kl",
        help="Instead of --remove: as many as possible with KL(dense ‖ pruned) on the text below this, in nats per "
        "token.",
    ),
]
Spend = Annotated[
    float | None,
    ABOVE_ZERO,
    what_option(
        "--max-kl",
        help="Instead of --sparsity or --bits: as much compression as possible with KL(dense ‖ compressed) on the text "
        "below this, in nats per token; found by bisection.",
    ),
]
KeepPeriod = Annotated[
    bool, what_option("--keep-period", help="Remove whole periods of a hybrid model, which some engines need.")
]


@dataclass(frozen=True)
class RankOptions:
    """What is ranked, and how."""

    what: What = "layers"
    criterion: Criterion = None
    protect: Protect = None

    def protected(self) -> list[int]:
        return layer_indices("--protect", self.protect) if self.protect is not None else []

    def settled(self, remove: float | None, *, periods: bool = False) -> RankOptions:
        """These options with a criterion, the default if none is given; `remove` is None where no number is known."""
        return (
            self if self.criterion else replace(self, criterion=default_criterion(remove, self.what, periods=periods))
        )

    def of_model(self, loaded: Decoder, given: Given) -> RankOptions:
        """These options with the default of encoders and encoder-decoders, which `best` does not take."""
        if not loaded.causal and "criterion" not in given:
            return replace(self, criterion=default_criterion(None, self.what))
        return self

    @property
    def goes_by(self) -> str:
        """The criterion, which is settled."""
        assert self.criterion is not None
        return self.criterion

    def require(self, given: Given, search: float | None = None) -> None:
        """Raise LyapunovPruneError, before torch is waited for, for options that the criterion does not take."""
        takes = CRITERIA[self.goes_by].options()
        if "search" not in takes:
            given.refuse(f"has no effect on --criterion {self.goes_by}; leave it out", "search")
        if self.what == "experts":
            given.refuse("applies to layers, and every layer loses the same number of experts; leave it out", "protect")
        CRITERIA.make(self.goes_by, **({"search": search} if "search" in takes else {}))
        self.protected()

    def rank(
        self,
        loaded: Decoder,
        batch: TokenBatch,
        remove: float | None,
        batch_size: int,
        *,
        search: float | None = None,
        mend: bool = False,
        judge: TokenBatch | None = None,
        folder: Path | None = None,
    ) -> Ranking:
        from lyapunov_prune.ranking.rank import rank

        return rank(
            loaded,
            batch,
            criterion=self.goes_by,
            what=self.what,
            remove=remove,
            batch_size=batch_size,
            protect=self.protected(),
            search=search,
            mend=mend and self.goes_by == "best",
            judge=judge,
            folder=folder,
        )


Method = Annotated[choices.Method, what_option(help=one_of(METHODS, "How a matrix is compressed."))]
Sparsity = Annotated[
    str | None,
    what_option(
        metavar="SHARE|N:M",
        help="Share to remove, of entries or (low rank) of parameters. 2:4 keeps two of every four inputs.",
    ),
]
Bits = Annotated[
    float | None, what_option(help="Bits per weight (rtn, gptq, awq), or 1.58; with an allocation the mean.")
]
Allocation = Annotated[
    str,
    what_option(
        autocompletion=lambda: list(SCHEDULES),
        help=one_of(SCHEDULES, "How the amount is divided over matrices, or the JSON file of an Allocation."),
    ),
]
GroupSize = Annotated[int | None, what_option(help="Number of weights per grid (rtn, gptq, awq); default: a row.")]

Stored = Annotated[
    choices.Stored,
    output_option("--format", help=one_of(formats_of("compress"), "Format of the checkpoint.")),
]

Output = Annotated[Path | None, output_option("--output", "-o", help="Folder for results; default: runs/MODEL.")]
Written = Annotated[
    choices.Written,
    output_option("--format", help=one_of(formats_of("export"), "Format of the checkpoint.")),
]
Quantize = Annotated[
    Quantisation | None,
    output_option(help="Type of the matrices in a .gguf file; default: f16, of which llama-quantize makes others."),
]
Target = Annotated[Path, output_option("--output", "-o", help="Folder for the checkpoint; must be new or empty.")]
