"""Hidden channels removed from every feed-forward block: by two scores, refitted or not, and by optipfair.

    python experiments/2_criteria/width/run.py [--model MODEL] [--text FILE] [--optipfair FOLDER]

Channels are chosen on one half of a text, and the last matrices refitted on every second window of it, as `prune --what
width` does; KL from the dense model and perplexity are measured on the other half. FOLDER is where optipfair is
installed (`pip install --no-deps --target FOLDER optipfair==0.4.2`); without it its rows are left out. Writes
MODEL-TEXT.json beside this file, one a text; what all of them say goes into README.md by `make tables`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

from experiments.common import Each, Inputs, Model, measure_each, run_command
from experiments.statements import ratio, short, table
from experiments.unseen import OnUnseenText, settings
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.reading import read
from lyapunov_prune.mending.refit import refit_blocks
from lyapunov_prune.predictions.spaces import divergences
from lyapunov_prune.pruning.removed import ChannelsGone
from lyapunov_prune.pruning.surgery import Operation, cut
from lyapunov_prune.pruning.width import DEFAULT, SCORES, choose_channels

HERE = Path(__file__).parent

OPTIPFAIR = "optipfair, activations", False


@dataclass(frozen=True)
class Narrowed:
    """A model of which `kept` channels a block stay: the loss of each window, and its KL from the dense model."""

    way: str
    refitted: bool
    kept: int
    windows: np.ndarray
    kl: np.ndarray


@dataclass(frozen=True)
class WidthOnOneText(OnUnseenText):
    width: int
    rows: tuple[Narrowed, ...]


def main(
    model: Model = Model(),
    text: Each = None,
    tokens: int = 4096,
    context: int = 512,
    remove: float = 0.2,
    optipfair: Annotated[Path | None, typer.Option(help="folder where it is installed")] = None,
) -> None:
    asked = partial(measure, remove=remove, optipfair=optipfair)
    measure_each(asked, HERE, model, text, tokens, context)


@torch.no_grad()
def measure(given: Inputs, remove: float, optipfair: Path | None) -> WidthOnOneText:
    decoder, evaluation = given.loaded, given.evaluation
    dense, width, rows = list(log_probabilities(decoder.model, evaluation.ids)), 0, list[Narrowed]()
    if optipfair is not None:
        for calibrated in (False, True):
            changed = by_optipfair(decoder.model, optipfair, remove, given.calibration.ids if calibrated else None)
            way = f"optipfair, {'activations' if calibrated else 'weights'}"
            stay = changed.config.get_text_config().intermediate_size
            rows.append(compared(way, False, stay, changed, dense, evaluation.ids))
    for score in SCORES:
        plan = choose_channels(decoder, given.calibration, remove, score=score)
        assert isinstance(plan.gone, ChannelsGone)
        width, kept = plan.gone.width, plan.gone.width - plan.gone.fewer
        halves = apart(read(decoder, given.calibration), of=2, most=None)
        _, weights = refit_blocks(decoder, plan.gone.kept_channels, halves[0])
        for refits in ({}, weights):
            changed = cut(decoder, Operation(plan, refits=refits), shared=True).model
            rows.append(compared(score, bool(refits), kept, changed, dense, evaluation.ids))
    return WidthOnOneText(losses(dense, evaluation.ids), *given.origins, width, tuple(rows))


def by_optipfair(model: PreTrainedModel, folder: Path, remove: float, ids: torch.Tensor | None) -> PreTrainedModel:
    """A copy pruned by optipfair's own call: by weights alone, or with activations on a text."""
    sys.path.append(str(folder))
    from optipfair import prune_model

    options: dict[str, Any] = {} if ids is None else {"dataloader": [{"input_ids": row.unsqueeze(0)} for row in ids]}
    return prune_model(
        copy.deepcopy(model),
        neuron_selection_method="MAW",
        pruning_percentage=100 * remove,
        expansion_divisor=64,
        show_progress=False,
        **options,
    ).eval()


def log_probabilities(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of every window, tokens × vocabulary."""
    for window in ids:
        yield model(window.unsqueeze(0).to(model.device), use_cache=False).logits[0].float().log_softmax(-1)


def losses(log_p: list[torch.Tensor], ids: torch.Tensor) -> np.ndarray:
    """The mean loss of every window, nats per token."""
    return np.array([loss(window, row) for window, row in zip(log_p, ids, strict=True)])


def loss(log_p: torch.Tensor, ids: torch.Tensor) -> float:
    return float(-log_p[:-1].gather(-1, ids[1:, None].to(log_p.device)).double().mean())


def compared(
    way: str, refitted: bool, kept: int, changed: PreTrainedModel, dense: list[torch.Tensor], ids: torch.Tensor
) -> Narrowed:
    windows, divergence = [], []
    for before, after, row in zip(dense, log_probabilities(changed, ids), ids, strict=True):
        windows.append(loss(after, row))
        divergence.append(float(divergences(before.double(), after.double())[1].mean()))
    print(f"{way}, {'refitted' if refitted else 'cut'}: KL {np.mean(divergence):.4f}", flush=True)
    return Narrowed(way, refitted, kept, np.array(windows), np.array(divergence))


def written() -> dict[str, str]:
    results = WidthOnOneText.all(HERE)
    head = ("model, text", "channels by", "kept", "last matrix", "KL", "perplexity", "over the dense")
    return {
        "setting": settings(results),
        "table": table(head, [row for r in results for row in _rows(r)]),
    } | {
        f"{r.measured_on.model.name} beside {name}": beside(r, way)
        for r in results
        for name, way in (("the cut", (best(r), False)), ("energy", ("energy", True)), ("optipfair", OPTIPFAIR))
        if way in {(row.way, row.refitted) for row in r.rows} - {(best(r), True)}
    }


def best(result: WidthOnOneText) -> str:
    """The score of `prune`, or `energy` in results from before it."""
    return DEFAULT if any(row.way == DEFAULT for row in result.rows) else "energy"


def beside(result: WidthOnOneText, way: tuple[str, bool]) -> str:
    """KL of `best`, refitted, over that of a score, refitted or not; paired by window."""
    of = {(row.way, row.refitted): np.log(row.kl) for row in result.rows}
    return ratio(of[best(result), True] - of[way])


def _rows(result: WidthOnOneText) -> Iterator[tuple[object, ...]]:
    for r in sorted(result.rows, key=lambda r: float(r.kl.mean())):
        yield (
            result.name,
            r.way if r.way.startswith("optipfair") else f"`{r.way}`",
            f"{r.kept:,} of {result.width:,}",
            "refitted" if r.refitted else "cut",
            short(float(r.kl.mean())),
            short(float(np.exp(r.windows.mean()))),
            ratio(r.windows - result.dense),
        )


if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
