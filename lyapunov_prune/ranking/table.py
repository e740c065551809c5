"""The criteria by name: a new one is a file in `criteria` and a row here. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import Final, Literal

from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.ranking.criterion import Criterion
from lyapunov_prune.registry import Registry

CRITERIA = Registry[Criterion](
    "criterion",
    "lyapunov_prune.ranking.criteria",
    (
        "rho",
        "bi",
        "blend",
        "blend-minmax",
        "angular",
        "kl",
        "reap",
        "frequency",
        "cosine",
        "oracle",
        "best",
        "from-end",
        "random",
    ),
)
# The paper uses `blend-minmax`. On three models, nine pairs of a model and a text, `bi` is better more often than
# worse than every other single criterion but the blend on its robust scale, which is better in nine removals of 18 and
# worse in three (experiments/2_criteria). `bi` takes a sixth of the forwards of that: it needs no rho.
DEFAULT: Final = "bi"


# Why no criterion ranks these parts.
_UNRANKED = {
    "activation": "no criterion orders activations; name the layers, as prune --layers 3,7",
    "width": "channels are no layers to rank; they are chosen by prune --what width --remove 20%",
}


def default_criterion(remove: int | float | None, what: str = "layers") -> Literal["best", "bi", "reap"]:
    """`best` if whole layers are removed and their number is known, `reap` for experts, else `bi`.

    On the models and texts of experiments/2_criteria, `best` is hardly worse than the single criterion that turns out
    to be the best one, and no single one is that everywhere.
    """
    if what == "experts":
        return "reap"
    return "best" if remove is not None and what == "layers" else DEFAULT


def require_ranks(
    criterion: str,
    what: str = "layers",
    *,
    remove: int | float | None = None,
    protect: bool = False,
    streamed: bool = False,
    profiled: bool = False,
) -> None:
    """Raise LyapunovPruneError if a criterion cannot rank `what` of the layers.

    It may be defined for whole layers only, need the number of layers to remove, or need what a `streamed` model
    cannot give, or more than a saved profile (`profiled`).
    """
    known, name = CRITERIA[criterion], f"criterion {criterion}"
    of = "whole layers" if known.parts == ("layers",) else ", ".join(known.parts)
    ranks = ", ".join(name for name, other in CRITERIA.items() if what in other.parts)
    streams = ", ".join(name for name, other in CRITERIA.items() if what in other.streamed)
    wrong = {
        _UNRANKED.get(what, ""): what in _UNRANKED,
        f"{name} is defined for {of} only; with --what {what} give one of {ranks}": what not in known.parts,
        f"{name} {known.chooses}; give --remove N with it": known.chooses and remove is None,
        f"{name} runs the model once for every layer, and a streamed one reads all of its files each time; go by one "
        f"of {streams}": streamed and what not in known.streamed,
        f"a profile holds no scores of {name if what == 'layers' else what}; give a MODEL to measure": (
            profiled and not (known.profiled and what == "layers")
        ),
        "as many experts leave every layer; leave out --protect": what == "experts" and protect,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(why)
