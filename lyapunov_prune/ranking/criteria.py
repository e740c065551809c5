"""The criteria by name, and what is refused of them before minutes of measuring.

It imports neither torch nor numpy: the command line asks here first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.ranking.counts import PARTS

# The paper goes by `blend`. On two models and three texts `bi` is better more often than worse than every other single
# criterion but the blend on its robust scale, which it does not differ from on the whole (experiments/25_three_texts),
# at a sixth of the forwards: it needs no rho.
DEFAULT: Final = "bi"


class Criterion(NamedTuple):
    """How a criterion orders layers, and what that takes.

    `measures` names what is measured of whole layers, the file it is kept in; `of_sublayers` the same of attention or
    MLP alone, None where that is not defined; "": nothing is measured. From that `score` makes the scores (smallest
    removed first), given the values that it `needs`, each an array whose last axis is the layers, and alpha. A
    criterion that has no scores chooses so many layers together: it must know how many, and `chooses` says how.
    """

    help: str
    reference: str
    measures: str
    of_sublayers: str | None = None
    needs: tuple[str, ...] = ()
    score: Callable[[Mapping[str, Any], float], Any] | None = None
    chooses: str = ""


_ROUNDING = 1e-12  # of the range: quartiles this near are equal


def _robust(x: Any) -> Any:
    """`(x − median) / IQR` over the last axis, by the whole range where the quartiles are equal; all alike: 0.

    On a scale from 0 to 1, as the paper has it, the one largest value says what all others weigh
    (experiments/38_scales).
    """
    import numpy as np

    least, low, middle, high, most = np.quantile(x, (0, 0.25, 0.5, 0.75, 1), axis=-1, keepdims=True)
    span = np.where(high - low > _ROUNDING * (most - least), high - low, most - least)
    return (x - middle) / (span + (span == 0))


CRITERIA: dict[str, Criterion] = {
    "rho": Criterion(
        "|rho − 1|, how far from 1 an error's growth is",
        "structural sensitivity, §6.5",
        "profile",
        needs=("rho",),
        score=lambda v, _: abs(v["rho"] - 1),
    ),
    "bi": Criterion(
        "Block Influence, how far the state is turned",
        "ShortGPT, arXiv:2403.03853; of sublayers LLM-Drop, arXiv:2406.15786",
        "influence",
        "sublayers",
        needs=("bi",),
        score=lambda v, _: v["bi"],
    ),
    "blend": Criterion(
        "alpha of rho, the rest of bi, each about its median by its quartiles",
        "structural sensitivity, §6.5; the scale by experiments/38_scales",
        "profile",
        needs=("rho", "bi"),
        score=lambda v, alpha: alpha * _robust(abs(v["rho"] - 1)) + (1 - alpha) * _robust(v["bi"]),
    ),
    "angular": Criterion(
        "the run of layers that turns the state least",
        "arXiv:2403.17887",
        "angular",
        chooses="removes a run of layers",
    ),
    "kl": Criterion(
        "how far the prediction moves without it",
        "Demystifying When Pruning Works via Representation Hierarchies, Theorem 3",
        "divergence",
        "sublayer-divergence",
        needs=("variance",),
        score=lambda v, _: v["variance"],
    ),
    "oracle": Criterion(
        "one by one, each time the least loss",
        "greedy search",
        "oracle",
        chooses="searches step by step",
    ),
    "best": Criterion(
        "what those propose, checked by the loss, and swaps",
        "measured, see experiments/35_best",
        "best",
        chooses="searches among sets",
    ),
    "from-end": Criterion(
        "the last first",
        "control",
        "",
        "",
        needs=("layer",),
        score=lambda v, _: (len(v["layer"]) - 1.0) - v["layer"],
    ),
    "random": Criterion(
        "by lot",
        "control",
        "",
        "",
        needs=("lot",),
        score=lambda v, _: v["lot"],
    ),
}


# What of `measures` and `of_sublayers` goes by the states of one forward, and so of a model that is streamed.
STREAMED = frozenset({"profile", "influence", "sublayers", "angular", "divergence", ""})
# What goes on where it was interrupted.
RESUMED = frozenset({"profile", "oracle", "best"})


def search_budget(layers: int, remove: int, mend: bool = False) -> float:
    """Forwards that `best` may spend: ten for what proposes sets, and one for 16 of the swaps that one set has.

    Mending takes as much again.
    """
    return (2 if mend else 1) * (10 + remove * (layers - remove) / 16)


def default_criterion(
    remove: int | float | None, what: str = "layers", *, periods: bool = False
) -> Literal["best", "bi"]:
    """`best` where whole layers go and their number is known, else `bi`.

    On the models and texts of experiments/35_best, `best` is hardly worse than the single criterion that turns out to
    be the best one, and no single one is that everywhere.
    """
    return "best" if remove is not None and what == "layers" and not periods else DEFAULT


def require_streamed(criterion: str, what: str = "layers") -> None:
    """Raise LyapunovPruneError for a criterion that a streamed model cannot be ranked by."""
    streamed = [
        name for name, c in CRITERIA.items() if (c.measures if what == "layers" else c.of_sublayers) in STREAMED
    ]
    if criterion not in streamed:
        raise LyapunovPruneError(
            f"criterion {criterion} runs the model once for every layer, and a streamed one reads all of its files "
            f"each time; go by one of {', '.join(streamed)}"
        )


def require_criterion(criterion: str, alpha: float) -> None:
    """Raise LyapunovPruneError for an unknown criterion, and for a weight `alpha` outside [0, 1]."""
    if criterion not in CRITERIA:
        raise LyapunovPruneError(f"unknown criterion {criterion!r}; give one of {', '.join(CRITERIA)}")
    if not 0 <= alpha <= 1:
        raise LyapunovPruneError(f"alpha {alpha:g} is outside [0, 1]; give a weight between them")


def require_temperature_of(criterion: str, temperature: float) -> None:
    """Raise LyapunovPruneError for a temperature that is not above 0, or beside a criterion without softmax."""
    if not 0 < temperature < float("inf"):
        raise LyapunovPruneError(f"temperature {temperature:g} is no temperature; give a number above 0")
    if temperature != 1 and criterion != "kl":
        raise LyapunovPruneError(f"criterion {criterion} knows no temperature; give --criterion kl with it")


def require_compares_mended(criterion: str) -> None:
    """Raise LyapunovPruneError for a criterion that checks no sets, and so compares none mended."""
    if criterion != "best":
        raise LyapunovPruneError(f"criterion {criterion} compares no sets of layers; with mend give criterion best")


def require_part(what: str, criterion: str | None = None) -> None:
    """Raise LyapunovPruneError for an unknown part of a model, and for one that `criterion` does not rank."""
    if what not in PARTS:
        raise LyapunovPruneError(f"unknown --what {what!r}; give one of {', '.join(PARTS)}")
    if criterion is not None and what == "activation":
        raise LyapunovPruneError("no criterion orders activations; name the layers, as prune --layers 3,7")
    if criterion is not None and what != "layers" and CRITERIA[criterion].of_sublayers is None:
        others = [name for name, other in CRITERIA.items() if other.of_sublayers is not None]
        raise LyapunovPruneError(
            f"criterion {criterion} is defined for whole layers only; "
            f"with --what {what} give --criterion {', '.join(others[:-1])} or {others[-1]}"
        )


def require_known_count(criterion: str, remove: int | float | None, periods: bool = False) -> None:
    """Raise LyapunovPruneError for one that chooses layers together and does not know how many, or is to keep periods.

    It goes by no order that could be cut off later, or put together to whole periods.
    """
    chooses = CRITERIA[criterion].chooses
    if chooses and remove is None:
        raise LyapunovPruneError(f"criterion {criterion} {chooses}; give --remove N with it")
    if chooses and periods:
        raise LyapunovPruneError(f"criterion {criterion} {chooses}, not periods; leave out --keep-period")


def require_profiled(criterion: str, what: str = "layers") -> None:
    """Raise LyapunovPruneError for a ranking that a saved profile of whole layers does not give."""
    if what != "layers" or CRITERIA[criterion].measures not in ("profile", "influence", ""):
        missing = what if what != "layers" else f"criterion {criterion}"
        raise LyapunovPruneError(f"a profile holds no scores of {missing}; give a MODEL to measure")
