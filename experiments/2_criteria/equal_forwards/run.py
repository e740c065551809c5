"""SLEB, BlockPruner and greedy by KL beside `best`, each with as many forwards. (arXiv:2402.09025, arXiv:2406.10594)

    python experiments/2_criteria/equal_forwards/run.py [--model MODEL] [--text FILE] [--search 5] [--beside SLEB]
        [--before FOLDER]

All choose on one half of a text, and each may spend as many forwards of the check windows of `best` as it does at the
least --search. A greedy search leaves out one unit at a time, the one without which the model is best, tried beside all
that are gone: SLEB a layer by the loss, BlockPruner an attention or an MLP by the loss until as many parameters are
gone, and the third a layer by the KL from the dense model. What is left of the budget is shared out over the steps that
remain, so it says how many tokens a step reads: the beginnings of as few windows as hold them, a quarter of each at
most. A trial is counted from its layer on, as those of `best` are. The models without what was chosen are scored on the
other half of the text. FOLDER has results of an earlier commit, of which what `best` chose for most forwards is a row
here. Writes MODEL-TEXT.json beside this file; finished greedy searches are kept, for another `best`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer

from experiments.common import Each, Inputs, Model, measure_each, run_command
from experiments.statements import percent, ratio, runs, table
from experiments.unseen import OnUnseenText, settings
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.evaluation.judging import POWER, apart, compare
from lyapunov_prune.forward.anatomy import KINDS, Sublayer, silent
from lyapunov_prune.forward.hooks import residual_stream, run_backbone
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.ranking.best import best_removal
from lyapunov_prune.ranking.candidates import SearchCost
from lyapunov_prune.ranking.search import PART
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
BEST, BEFORE = "`best`", "`best` before"
FEW = 16  # tokens that a step reads at least
LONG = ("model, text", "forwards", "removed", "loss, nats", "before: forwards", "removed", "loss, nats", "over before")


@dataclass(frozen=True, eq=False)
class Block:
    """Attention or MLP of a layer, and its share of the parameters of all layers."""

    layer: int
    kind: str
    part: Sublayer
    share: float


Unit = tuple[Block, ...]  # goes as one
Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Chosen:
    """What a search chose for `forwards` dense forwards of the check windows; the loss without it, nats a window.

    `tokens` is how many tokens its steps read, the fewest and the most; `share` that of the layers' parameters that go.
    """

    way: str
    search: float
    forwards: float
    tokens: tuple[int, int]
    attentions: tuple[int, ...]
    mlps: tuple[int, ...]
    share: float
    windows: np.ndarray


@dataclass(frozen=True)
class EqualForwards(OnUnseenText):
    chosen: tuple[Chosen, ...]


def main(
    model: Model = Model(),
    text: Each = None,
    tokens: int = 4096,
    context: int = 512,
    remove: Annotated[float, typer.Option(help="share of the layers")] = 0.25,
    search: Annotated[list[float], typer.Option(help="forwards that best may spend")] = [5.0, 10.0],  # noqa: B006
    beside: Annotated[list[str], typer.Option(help="greedy searches")] = ["SLEB", "greedy by KL", "BlockPruner"],  # noqa: B006
    before: Annotated[Path | None, typer.Option(help="a folder of earlier results")] = None,
) -> None:
    asked = partial(measure, remove=remove, searches=search, beside=beside, before=before)
    measure_each(asked, HERE, model, text, tokens, context)


def measure(
    given: Inputs, remove: float, searches: Sequence[float], beside: Sequence[str], before: Path | None
) -> EqualForwards:
    decoder = given.loaded
    reading, judged = read(decoder, given.calibration), read(decoder, given.evaluation)
    blocks = blocks_of(reading)
    layers = [tuple(b for b in blocks if b.layer == layer) for layer in range(decoder.structure.num_layers)]
    count, found = int(remove * len(layers)), list[Chosen]()
    scoring, checking = apart(reading, of=2, most=None, least=POWER)
    whole = SearchCost.of(checking, scoring)
    parts = [(block,) for block in blocks]
    about = {"texts": encode(given.origins), "remove": count}
    with Store(given.jobs / "equal-forwards", "equal forwards", about) as store:
        for search in sorted(searches):
            best = best_removal(decoder, reading, count, search=search, folder=given.jobs)
            gone = [block for layer in best.remove for block in layers[layer]]
            seen = checking.batch.ids[:, : checking.batch.ids.shape[1] // PART].numel(), checking.batch.ids.numel()
            target = _share(gone)
            found.append(chosen(BEST, search, best.forwards, seen, gone, judged))
            for way in beside if search == min(searches) else ():
                units, score = (parts if way == "BlockPruner" else layers), WAYS[way]
                key = f"{way}, {search:g} forwards"
                if key not in store:
                    budget = search * checking.batch.ids.numel()
                    spent, seen, gone = greedy(reading, units, target, budget, whole.head, score)
                    store.add(key, encode(chosen(way, search, spent * search / budget, seen, gone, judged)))
                found.append(decode(Chosen, store[key]))
    result = EqualForwards(losses(judged, []), *given.origins, tuple(found))
    return result if before is None else with_earlier(result, EqualForwards.all(before))


def with_earlier(result: EqualForwards, earlier: Sequence[EqualForwards]) -> EqualForwards:
    """`result` with what `best` chose for most forwards, in the one of the same model and texts."""
    of = next(each for each in earlier if each.name == result.name)
    assert of.measured_on.text_hash == result.measured_on.text_hash
    most = max((each for each in of.chosen if each.way in (BEST, BEFORE)), key=lambda each: each.search)
    return replace(result, chosen=(*result.chosen, replace(most, way=BEFORE)))


def blocks_of(reading: Reading) -> list[Block]:
    """Attention and MLP of every layer, in their order."""
    layers = reading.structure.layers
    inside = sum(p.numel() for p in layers.parameters())
    found = []
    for index, anatomy in reading.anatomy.items():
        for kind, part in anatomy.whole.items():
            names = [name for branch in part.branches for name in branch.parts]
            held = sum(p.numel() for name in names for p in layers[index].get_submodule(name).parameters())
            found.append(Block(index, kind, part, held / inside))
    return found


def without(blocks: Sequence[Block]) -> AbstractContextManager[None]:
    return silent(*(block.part for block in blocks))


@torch.no_grad()
def greedy(
    reading: Reading, units: Sequence[Unit], target: float, budget: float, head: float, score: Score
) -> tuple[float, tuple[int, int], list[Block]]:
    """Leave out one unit at a time, that of least `score`, until a share `target` of the layers' parameters is gone.

    `budget` and what is spent count tokens of dense forwards. Returns what was spent, the fewest and most tokens that a
    step read, and the blocks that go.
    """
    gone: list[Block] = []
    left, lengths, each = budget, list[int](), sum(_share(unit) for unit in units) / len(units)
    while (missing := target - _share(gone)) > each / 100:
        free = [unit for unit in units if unit[0] not in gone]
        cost = step_cost(free, gone, head) + (score is divergence)
        ids = beginnings(reading.batch, int(left / cost / max(1, round(missing / each))))
        left -= cost * ids.numel()
        lengths.append(ids.numel())
        dense = reading.model(ids, use_cache=False).logits if score is divergence else torch.empty(0)
        with without(gone):
            states = boundaries(reading, ids)
            found = []
            for unit in free:
                entry = reading.prefix.entry(unit[0].layer)
                with without(unit), reading.prefix.entered(entry, states[entry]):
                    found.append(float(score(reading.model(ids, use_cache=False).logits, dense, ids)))
        gone += free[int(np.argmin(np.nan_to_num(found, nan=np.inf)))]
    return budget - left, (min(lengths), max(lengths)), gone


def boundaries(reading: Reading, ids: torch.Tensor) -> list[torch.Tensor]:
    """The state before each layer."""
    states: list[torch.Tensor] = []
    with residual_stream(reading.structure, lambda boundary, hidden: states.append(hidden.clone())):
        run_backbone(reading.structure, ids)
    return states


def _share(blocks: Sequence[Block]) -> float:
    return sum(block.share for block in blocks)


def step_cost(free: Sequence[Unit], gone: Sequence[Block], head: float) -> float:
    """Dense forwards that one step takes: the states of what is left, and a trial of every unit from its layer on."""
    left = [block for unit in free for block in unit]
    inside = _share(left) + sum(
        _share([block for block in left if block.layer >= unit[0].layer and block not in unit]) for unit in free
    )
    return (1 - head) * inside / (_share(left) + _share(gone)) + head * len(free)


def beginnings(batch: TokenBatch, tokens: int) -> torch.Tensor:
    """About so many tokens: the beginnings of as few windows as hold them, each as `best` reads it at most."""
    tokens, most = max(FEW, tokens), batch.ids.shape[1] // PART
    windows = min(len(batch.ids), math.ceil(tokens / most))
    return batch.ids[:windows, : min(most, tokens // windows)]


def loss(logits: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def divergence(logits: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`KL(dense ‖ changed)`, the mean over all positions, nats."""
    p, q = (z.flatten(0, 1).float().log_softmax(-1) for z in (dense, logits))
    return F.kl_div(q, p, log_target=True, reduction="batchmean")


# What each greedy search goes by; BlockPruner leaves out attentions and MLPs, the others whole layers.
WAYS: dict[str, Score] = {"SLEB": loss, "greedy by KL": divergence, "BlockPruner": loss}


@torch.no_grad()
def losses(reading: Reading, gone: Sequence[Block]) -> np.ndarray:
    """The mean loss of every window without `gone`, nats."""
    with without(gone):
        return np.array([reading.scorer(row[None])[0][0] for row in reading.batch.ids])


def chosen(
    way: str, search: float, forwards: float, tokens: tuple[int, int], gone: Sequence[Block], judged: Reading
) -> Chosen:
    attentions, mlps = (tuple(sorted(b.layer for b in gone if b.kind == kind)) for kind in KINDS)
    found = Chosen(way, search, forwards, tokens, attentions, mlps, _share(gone), losses(judged, gone))
    print(f"{way}: {forwards:.2f} forwards, without {attentions} and {mlps}: {found.windows.mean():.4f}", flush=True)
    return found


def written() -> dict[str, str]:
    results = EqualForwards.all(HERE)
    head = ("model, text", "chosen by", "forwards", "tokens a step", "attentions that go", "MLPs that go")
    rows = [row for result in results for row in _rows(result)]
    pairs = [pair for result in results for pair in _beside_best(result)]
    compared = [compare(best.windows, each.windows) for best, each in pairs]
    better, worse = sum(c.harms for c in compared), sum(c.pays for c in compared)
    return {
        "setting": settings(results),
        "table": table((*head, "of the parameters", "over the dense", "over `best`"), rows),
        "compared": f"{len(pairs)} comparisons: better in {better}, worse in {worse}",
        "lower": f"{sum(best.windows.mean() < each.windows.mean() for best, each in pairs)} of {len(pairs)}",
        "spread": _spread(results),
        "longer": table(LONG, [row for result in results for row in _longer(result)]),
    }


def _longer(result: EqualForwards) -> list[tuple[object, ...]]:
    """The choices of `best` beside the one before, by many forwards."""
    few, most = _by_best(result)
    return [
        (
            result.name,
            *(cell for each in pair for cell in (each.forwards, runs(each.attentions), each.windows.mean())),
            percent(round(_more_lost(*pair), 4) + 0.0),
        )
        for pair in product(few, most)
    ]


def _spread(results: Sequence[EqualForwards]) -> str:
    """By how much the loss of what `best` chooses differs from that of the choice before."""
    found: dict[float, list[float]] = {}
    for few, most in map(_by_best, results):
        for pair in product(few, most):
            found.setdefault(pair[0].search, []).append(100 * _more_lost(*pair))
    return ", ".join(
        f"{search:g} forwards {min(off):+.1f} to {max(off):+.1f} % ({len(off)} times)"
        for search, off in sorted(found.items())
    )


def _by_best(result: EqualForwards) -> tuple[list[Chosen], list[Chosen]]:
    now, before = ([each for each in result.chosen if each.way == way] for way in (BEST, BEFORE))
    return now, before


def _more_lost(few: Chosen, most: Chosen) -> float:
    return float(few.windows.mean() / most.windows.mean()) - 1


def _beside_best(result: EqualForwards) -> list[tuple[Chosen, Chosen]]:
    """Every other choice, after the one of `best` that spent as much."""
    best = {each.search: each for each in result.chosen if each.way == BEST}
    return [(best[each.search], each) for each in result.chosen if each.way not in (BEST, BEFORE)]


def _rows(result: EqualForwards) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for each in result.chosen:
        best = next((best for best, other in _beside_best(result) if other is each), each)
        rows.append(
            (
                result.name,
                each.way,
                each.forwards,
                " to ".join(dict.fromkeys(map(str, each.tokens))),
                runs(each.attentions),
                "the same" if each.mlps == each.attentions else runs(each.mlps),
                percent(each.share),
                ratio(each.windows - result.dense),
                "" if each is best else ratio(each.windows - best.windows),
            )
        )
    return rows


if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
