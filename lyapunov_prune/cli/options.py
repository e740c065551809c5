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
from lyapunov_prune.arguments import MOST_SEED, Range
from lyapunov_prune.cli import choices
from lyapunov_prune.cli.records import Given
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.table import formats_of
from lyapunov_prune.merging.table import REDUCTIONS
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
            raise LyapunovPruneError(f"{option} {layers!r} is no list of layers; write it as 3,7 or 3-7")
        first, last = map(int, ends.groups()) if ends else (int(part), int(part))
        if first > last or last - first > MOST_LAYERS:
            raise LyapunovPruneError(f"{option} {part} is no range of layers; give the smaller number first")
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
    raise typer.BadParameter(f"{text!r} is no number, as 7, and no share below 100%, as 25%")


ABOVE_ZERO = Range(above=True)
# Of an option that says how many layers go.
counted = {"parser": count_or_share, "metavar": "N|N%"}


def one_of(table: Mapping[str, Any], *more: str) -> str:
    """Help of an option that takes a name of a table: `more`, then a line an entry."""
    return "\n\n".join([*more, *(f"{name}: {entry.help}" for name, entry in table.items())])


SPREAD = "spread"  # the value of --device for a model over several of them


@dataclass(frozen=True)
class ModelOptions:
    """Where a model comes from and where it runs."""

    device: Annotated[
        str,
        model_option(
            help="cpu, cuda, cuda:1 or mps; auto is the GPU if there is one, else the CPU; spread lays the layers over "
            "GPUs, memory, then the disk (not to train)."
        ),
    ] = "auto"
    dtype: Annotated[
        choices.DType | None,
        model_option(help="Of the weights in memory; without a default, as the checkpoint has them."),
    ] = None

    @property
    def spread(self) -> bool:
        return self.device == SPREAD

    def load(
        self, model: str, *, stream: bool = False, text_only: bool = False, stack: choices.Stack | None = None
    ) -> Decoder:
        if stream:
            self.require_one_place("--stream")
            from lyapunov_prune.checkpoints.streamed import load_streamed

            return load_streamed(model, dtype=self.dtype, device=self.device)

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
        """Raise LyapunovPruneError for a model that is spread: `what` needs it on one device."""
        if self.spread:
            raise LyapunovPruneError(f"{what} needs the model on one device; leave out --device {SPREAD}")


@dataclass(frozen=True)
class TextOptions:
    """The text, and how it is cut into windows and fed."""

    text: Annotated[
        str,
        text_option(
            help="builtin, a .txt file, a file of rows such as x.jsonl or x.csv:COLUMN, a hub data set "
            "name[:config[:split[:COLUMN]]], or self: written by the (dense) model, which prune --mend and heal take "
            "if none is given. Chats are written by the model's chat template."
        ),
    ] = "builtin"
    tokens: Annotated[int, text_option(min=2, help="How many tokens to measure on.")] = 4096
    context: Annotated[int, text_option(min=2, help="Tokens in a window.")] = 512

    def as_eval(self, context: int) -> TextOptions:
        """The same text to score on: as much as `eval` takes, at the most, in windows of `context` tokens."""
        return replace(self, tokens=max(context, min(self.tokens, TextOptions.tokens)), context=context)

    def load(
        self,
        loaded: Decoder,
        split: choices.Split,
        *,
        folder: Path | None = None,
        resume: bool = False,
    ) -> TokenBatch:
        """The windows, of a text or written by the model, then kept in `folder` as they are written."""
        from lyapunov_prune.cli.terminal import note
        from lyapunov_prune.data.batch import checked_batch
        from lyapunov_prune.data.text import load_text
        from lyapunov_prune.forward.own_text import SELF, written_by

        if self.text == SELF:
            return written_by(loaded.model, split, self.tokens, self.context, folder=folder, resume=resume)
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


IN_MEMORY = "needs the model in memory; leave it out, or --stream"
Model = Annotated[str, typer.Argument(help="Hub id, folder, .gguf file (see cache), or smollm2-135m (built in).")]
Format = Annotated[
    choices.Format,
    output_option(help=one_of(formats_of("prune"), "What is written.")),
]
Mend = Annotated[bool, what_option("--mend", help="Close the gaps by maps fitted on the text, without training.")]
Judge = Annotated[
    str | None,
    text_option(
        help="A second text that judges, as --text. If not given: for --mend and --what width self, or builtin by "
        "--text self; for heal every eighth window of its text."
    ),
]
Stream = Annotated[
    bool,
    model_option("--stream", help="For a model larger than memory: one layer at a time, read from its safetensors."),
]
Stack = Annotated[
    choices.Stack | None,
    model_option("--stack", help="Of an encoder-decoder, such as T5: whose layers, the encoder's or the decoder's."),
]
OnDisk = Annotated[bool, model_option("--on-disk", help="Copy the kept tensors; the model is never in memory.")]

Seed = Annotated[int, what_option(min=0, max=MOST_SEED, help="First random seed.")]
Seeds = Annotated[int, what_option(min=1, help="How many perturbations to average over.")]
Images = Annotated[
    str | None,
    text_option(help="For a ViT or DeiT: mnist-5k, a folder of class folders, or an .npz, in place of a text."),
]
Items = Annotated[int | None, what_option("--limit", min=1, help="How many items of a file or task; all if not given.")]

Criterion = Annotated[
    choices.Criterion | None,
    what_option(
        help=one_of(
            CRITERIA,
            "What layers are chosen by; if not given, best where --remove says how many whole layers of a model in "
            "memory go, reap for experts, else bi.",
        )
    ),
]
Protect = Annotated[str | None, what_option(help="Layers that stay, as 0-2,-1 (negative: counted from the end).")]
Search = Annotated[
    float | None,
    what_option(
        help="Forwards of the check windows that --criterion best may spend; if not given, by the number of layers: "
        "20 for 7 of 30, 40 with --mend."
    ),
]
What = Annotated[
    choices.What,
    what_option(
        help="Whole layers; the attention or the MLP of each (by "
        f"{', '.join(name for name, c in CRITERIA.items() if 'mlp' in c.parts)}); its activation (by none: "
        "prune --layers); hidden channels of all feed-forward blocks or experts (prune); experts, as many of every "
        "layer (by "
        f"{', '.join(name for name, c in CRITERIA.items() if 'experts' in c.parts)}); or layers and one of the "
        "last two by measured loss (prune --remove 20%: of the parameters of the layers). In a plain checkpoint a part "
        "of a layer saves no time, and channels do."
    ),
]
Reduction = Annotated[
    choices.Reduction | None,
    what_option(help=one_of(REDUCTIONS, "With --what activation: the linear map that the block becomes.")),
]
MaxKL = Annotated[
    float | None,
    ABOVE_ZERO,
    what_option(
        "--max-kl", help="Instead of --remove: as many as keep KL(dense ‖ pruned) on the text below it, nats a token."
    ),
]
Spend = Annotated[
    float | None,
    ABOVE_ZERO,
    what_option(
        "--max-kl",
        help="Instead of --sparsity or --bits: the most that keeps KL(dense ‖ compressed) on the text below it, nats a "
        "token, by bisection.",
    ),
]
KeepPeriod = Annotated[
    bool, what_option("--keep-period", help="Remove whole periods of a hybrid, as some serving engines need.")
]


@dataclass(frozen=True)
class RankOptions:
    """What is ranked, and by which criterion."""

    what: What = "layers"
    criterion: Criterion = None
    protect: Protect = None
    search: Search = None

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

    def require(self, given: Given) -> None:
        """Raise LyapunovPruneError, before torch is waited for, for options that the criterion does not take."""
        takes = CRITERIA[self.goes_by].options()
        idle = f"has no effect on --criterion {self.goes_by}; leave it out"
        if "search" not in takes:
            given.refuse(idle, "search")
        if self.what == "experts":
            given.refuse("is of layers, and as many experts leave every layer; leave it out", "protect")
        CRITERIA.make(self.goes_by, **({"search": self.search} if "search" in takes else {}))
        self.protected()

    def rank(
        self,
        loaded: Decoder,
        batch: TokenBatch,
        remove: float | None,
        batch_size: int,
        *,
        mend: bool = False,
        judge: TokenBatch | None = None,
        folder: Path | None = None,
        resume: bool = False,
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
            search=self.search,
            mend=mend and self.goes_by == "best",
            judge=judge,
            folder=folder,
            resume=resume,
        )


Method = Annotated[choices.Method, what_option(help=one_of(METHODS, "What a matrix is replaced by."))]
Sparsity = Annotated[
    float | None, ABOVE_ZERO, what_option(help="Share removed: of entries, or of parameters by low rank.")
]
Rank = Annotated[int | None, what_option(help="Rank that a low-rank method leaves a matrix, in place of --sparsity.")]
Bits = Annotated[
    float | None, what_option(help="Bits a weight (rtn, gptq, awq), or 1.58; the mean with an allocation of bits.")
]
Allocation = Annotated[
    str,
    what_option(
        autocompletion=lambda: list(SCHEDULES),
        help=one_of(SCHEDULES, "How much of which matrix, or the JSON file of an Allocation."),
    ),
]
Pattern = Annotated[str | None, what_option(help="Keep so many of so many inputs, as 2:4 (then without --sparsity).")]
GroupSize = Annotated[int | None, what_option(help="Weights that share a grid (rtn, gptq, awq); a row if not given.")]
Weighted = Annotated[
    bool,
    what_option("--weighted", help="Weigh tokens by how far an error there moves the prediction (sparsegpt, gptq)."),
]
Correction = Annotated[
    float, what_option(help="How far to correct toward the dense model's outputs, 0 to 1 (sparsegpt, gptq).")
]

Stored = Annotated[
    choices.Stored,
    output_option("--format", help=one_of(formats_of("compress"), "What is written.")),
]

Output = Annotated[Path | None, output_option("--output", "-o", help="Folder for results; runs/MODEL if not given.")]
Written = Annotated[
    choices.Written,
    output_option("--format", help=one_of(formats_of("export"), "What is written.")),
]
Quantize = Annotated[
    str | None,
    output_option(
        help="Type of the matrices of a .gguf file: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0; f16 if not given."
    ),
]
Target = Annotated[Path, output_option("--output", "-o", help="Folder of the checkpoint; must be empty.")]
Resume = Annotated[bool, output_option("--resume", help="Keep what an interrupted run has done.")]
Json = Annotated[bool, output_option("--json", help="Print one JSON document on stdout, and nothing else.")]
