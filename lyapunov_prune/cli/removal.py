"""The options of `prune` that say what is removed, and the refusals of those that do not go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lyapunov_prune.cli import checks
from lyapunov_prune.cli.options import DISK, LAYERS, Inputs, Judge, TextOptions, counted, what_option
from lyapunov_prune.cli.ranked import RankOptions
from lyapunov_prune.cli.records import Given
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.ranking.table import require_ranks

if TYPE_CHECKING:
    from lyapunov_prune.export.format import Format as Stored

UNJUDGED = "names the text that judges --mend and --what width; give one of them, or leave it out"


@dataclass(frozen=True)
class AskedRemoval:
    """What is removed, said by one of these."""

    remove: Annotated[
        float | None, what_option(help="Number or share of layers, channels, or experts per layer.", **counted)
    ] = None
    layers: Annotated[str | None, LAYERS, what_option(help="The layers to remove, as 3,7 or 3-7 (counted from 0).")] = (
        None
    )
    plan_file: Annotated[Path | None, checks.FILE, what_option("--plan", help="A plan.json.")] = None


@dataclass(frozen=True)
class RemovalOptions(RankOptions, AskedRemoval):  # in this order --help begins with what is asked
    """What is removed, by what ranking, and what is done about the gaps."""

    search: Annotated[
        float | None,
        what_option(
            help="Number of forward passes over the check windows that --criterion best may use. Default: depends on "
            "the number of layers, for 7 of 30 it is 20, and 40 with --mend."
        ),
    ] = None
    mend: Annotated[
        bool, what_option("--mend", help="Fit linear maps on the text that replace what was removed, without training.")
    ] = False
    judge: Judge = None


def require_one_choice(removal: RemovalOptions, given: Given) -> None:
    """Raise LyapunovPruneError unless exactly one option says what is removed."""
    ways = removal.remove, removal.layers, removal.plan_file
    if sum(way is not None for way in ways) != 1:
        raise LyapunovPruneError("give --remove N, --layers 3,7 or --plan FILE, one of the three")
    if removal.plan_file is not None:
        given.refuse("has no effect, because the plan says what is removed; leave it out", "what")


def settled(removal: RemovalOptions, given: Given) -> RemovalOptions:
    """`removal` with its criterion. Raises LyapunovPruneError for options that do not go together."""
    what, remove = removal.what, removal.remove
    if what in ("width", "experts"):
        given.refuse(f"names whole layers, and --what {what} removes other parts; give --remove or --plan", "layers")
    if remove is None:
        given.refuse_record(
            "applies to layers that a criterion chooses; give --remove with it",
            RankOptions,
            but="what",
            also="search",
        )
    if what == "width":
        idle = "applies to layers, and --what width removes none; leave it out"
        given.refuse_record(idle, RankOptions, but="what")
        given.refuse(idle, "search")
    else:
        removal = removal.settled(remove)
        removal.require(given, removal.search)
    if what != "width" and remove is not None:
        require_ranks(removal.goes_by, what, remove=remove)
    return removal


def require_held(what: str, stored: Stored, given: Given) -> None:
    """Raise LyapunovPruneError for what the format cannot hold."""
    if what != "layers" and stored.name == "gguf":
        given.refuse(f"{what} removes parts of layers, which a .gguf file has; give a folder as --output", "what")
    if what != "layers" or not stored.mends:
        given.refuse("closes the gaps of whole layers; leave it out, or --what", "mend")


def require_files(removal: RemovalOptions, inputs: Inputs, why: str, packed: str | None, given: Given) -> None:
    """Raise LyapunovPruneError for options that need a model in memory."""
    measured = removal.what == "width" and removal.remove is not None and inputs.disk and not packed
    what = ["what"] if removal.what != "layers" else []
    given.refuse(
        f"needs {'plain weights' if packed else 'the model in memory'} ({why}); give --layers 3,7 instead, or a --plan "
        f"FILE from rank{'' if packed else f' --device {DISK}'}",
        *([] if measured else [*what, "remove"]),
        *("mend", "judge", "dtype"),
    )
    if not measured:
        given.refuse_record(
            f"has no effect where files are pruned ({why}): --layers or --plan says what is removed, and no text is "
            "read; leave it out, and score the result with eval",
            TextOptions,
        )
