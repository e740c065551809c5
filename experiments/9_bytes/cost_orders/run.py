"""Which cost orders matrices as the prediction does, and spends bytes best: the scores of the papers, and Fisher's.

    python experiments/9_bytes/cost_orders/run.py [--model MODEL] --text FILE [--text FILE]

Every matrix is rounded alone to one type, and the KL from the dense model measured: on the same tokens of the built-in
text as the costs. Then each cost chooses types of least sum within a mean number of bits, and the KL of that model is
measured on every --text. MODEL is one off its grid (`smollm2-135m-dithered-0`). Writes MODEL.json.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.block_types import fill, read_and_made
from experiments.common import BUILT_IN, DITHERED, Each, Model, committed, plain, read_text, run_command
from experiments.statements import bullets, quotient, ranked, short, table
from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.cost import TensorCost, costs
from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.budget.spend import chosen_types
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.forward.replacement import with_data
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.ggml import Kind
from lyapunov_prune.predictions.divergence import kl_by_window
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
KIND = Kind.IQ4_NL  # that rows of any width can take; 4.5 bits
BITS = 4.75  # a weight; rows of 576 and 640 numbers have no type below 4.25
ONE_AT_A_TIME = 2  # windows on which a matrix is rounded alone
SAMPLED = 2**20  # numbers of a matrix whose error is measured in every type
FISHER, MEASURED = "Fisher information", "KL, measured one at a time"
OUTPUT, RELATIVE, WEIGHT = "output error", "relative output error", "relative weight error"
OWN, LATER = "relative output error × ρ", "relative output error × later ρ"
COSTS = (FISHER, OUTPUT, RELATIVE, LATER, OWN, WEIGHT, MEASURED)


@dataclass(frozen=True)
class Chosen:
    """The types of least `cost`: KL(dense ‖ rounded) of every window, nats a token."""

    cost: str
    kl: tuple[float, ...]


@dataclass(frozen=True)
class OnText:
    chosen: tuple[Chosen, ...]
    measured_on: MeasuredOn

    def kl(self, cost: str) -> np.ndarray:
        return next(np.array(c.kl) for c in self.chosen if c.cost == cost)


@dataclass(frozen=True)
class CostOrders(Result):
    """The costs of every matrix in `KIND`, of a layer or (−1) of none, and what they choose at `bits` on each text."""

    names: tuple[str, ...]
    layers: tuple[int, ...]
    costs: dict[str, np.ndarray]  # (matrices,)
    bits: float
    texts: tuple[OnText, ...]
    commit: str
    calibrated_on: MeasuredOn

    @property
    def model(self) -> str:
        return self.calibrated_on.model.name

    def correlation(self, cost: str, by_layer: bool) -> tuple[float, int]:
        """Spearman's with the measured KL, over matrices or over the sums of layers, and of how many."""
        x, y = (self._grouped(self.costs[name], by_layer) for name in (cost, MEASURED))
        return float(stats.spearmanr(x, y).statistic), len(x)

    def _grouped(self, values: np.ndarray, by_layer: bool) -> np.ndarray:
        layers = np.array(self.layers)
        return np.bincount(layers[layers >= 0], values[layers >= 0]) if by_layer else values


def main(
    model: Model = Model(f"{BUILT_IN}-dithered-0"), text: Each = None, windows: int = 24, tokens: int = 4096
) -> None:
    commit, dense = committed(), model.load()  # refused here, not after the work
    reading = read(dense, read_text(dense, "builtin", windows * 256, 256))
    judges = [read(dense, read_text(dense, each, tokens, 256, "all")) for each in text or ()]
    small = copy.deepcopy(dense.model)
    known = list(costs(reading, bits=BITS))
    with Store(model.jobs, "cost orders", reading.measured_on().key) as store:
        alone = np.array(list(one_at_a_time(reading, small, known, store)))
    of = all_costs(reading, known, alone)
    room = int(BITS * sum(p.numel() for p in matrices_of(small).values()) / 8)
    texts = [OnText((), judge.measured_on()) for judge in judges]
    for name in COSTS:
        pick = chosen_types([replace(t, cost=cost) for t, cost in zip(known, of[name], strict=True)], room)
        fill(small, dense.model, known, pick)
        for n, judge in enumerate(judges):
            kl = kl_by_window(judge, read(wrap(small), judge.batch))[0]
            texts[n] = replace(texts[n], chosen=(*texts[n].chosen, Chosen(name, tuple(kl.tolist()))))
            print(name, judge.batch.text, kl.mean(), flush=True)
    at, layers = [t.kinds.index(KIND) for t in known], layers_of(dense)
    CostOrders(
        tuple(t.name for t in known),
        tuple(layers.get(t.name, -1) for t in known),
        {name: np.array([c[k] for c, k in zip(of[name], at, strict=True)]) for name in COSTS},
        BITS,
        tuple(texts),
        commit,
        reading.measured_on(),
    ).save(HERE / f"{plain(model.name)}.json")


def layers_of(dense: Decoder) -> dict[str, int]:
    """The layer of each parameter that lies in one."""
    number = {id(p): i for i, layer in enumerate(dense.layers) for p in layer.parameters()}
    return {name: number[id(p)] for name, p in dense.model.named_parameters() if id(p) in number}


@torch.no_grad()
def one_at_a_time(
    reading: Reading, small: PreTrainedModel, known: Sequence[TensorCost], store: Store
) -> Iterator[float]:
    """The KL with each matrix alone in `KIND`, the others dense."""
    batch = reading.batch.take(range(ONE_AT_A_TIME))
    few, changed = read(reading.decoder, batch), wrap(small)
    for t in known:
        if t.name not in store:
            p = small.get_parameter(t.name)
            with with_data({p: torch.from_numpy(BLOCKS.rounded(p.numpy(), KIND, t.importance))}):
                store.add(t.name, float(kl_by_window(few, read(changed, batch))[0].mean()))
            print(t.name, store[t.name], flush=True)
        yield store[t.name]


def all_costs(reading: Reading, known: Sequence[TensorCost], alone: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Every cost of every matrix in all of its types, (K,); matrices outside the layers have the ρ of none.

    `output error` is `Σ_ij E[x_j²] ΔW_ij²`, as an importance matrix weighs it, and relative that over `E‖Wx‖²`. The
    energy of an error grows by ρ in its own layer, and up to the end by the product of all later ρ.
    """
    dense = reading.decoder
    rho = lp.measure_contraction(dense.model, reading.batch.take(range(min(8, len(reading.batch)))), seeds=range(2))
    matrices, (squares, energy) = matrices_of(dense.model), read_and_made(reading)
    # An embedding that is no head has inputs of one 1 each.
    squares = {name: np.full(p.shape[1], 1 / len(p)) for name, p in matrices.items()} | squares
    energy = {name: float(p.square().sum(dtype=torch.float64)) / len(p) for name, p in matrices.items()} | energy
    layers = layers_of(dense)
    found: dict[str, list[np.ndarray]] = {name: [] for name in COSTS}
    for t, kl in zip(known, alone, strict=True):
        W = dense.model.get_parameter(t.name).detach().numpy()
        step = -(-W.size // SAMPLED)
        moved = [np.square(BLOCKS.rounded(W[::step], k, t.importance) - W[::step]) * step for k in t.kinds]
        output = np.array([(m @ squares[t.name]).sum(dtype=np.float64) for m in moved])
        relative, layer = output / energy[t.name], layers.get(t.name)
        found[FISHER].append(t.cost)
        found[OUTPUT].append(output)
        found[RELATIVE].append(relative)
        found[OWN].append(relative * (1 if layer is None else rho.rho[layer]))
        found[LATER].append(relative * (1 if layer is None else rho.downstream_amplification[layer]))
        found[WEIGHT].append(np.array([m.sum(dtype=np.float64) for m in moved]) / np.square(W).sum(dtype=np.float64))
        found[MEASURED].append(kl * output / output[t.kinds.index(KIND)])
    return found


def written() -> dict[str, str]:
    found = [CostOrders.load(path) for path in sorted(HERE.glob("*.json"))]
    return {"setting": bullets(*map(_setting, found)), "ranks": _ranks(found), "bytes": _bytes(found)}


def _setting(r: CostOrders) -> str:
    return (
        f"{len(r.names)} matrices; commit {r.commit}; costs on {r.calibrated_on.line()}, one at a time on its first "
        f"{ONE_AT_A_TIME} windows; reported on {'; '.join(t.measured_on.line() for t in r.texts)}"
    )


def _ranks(found: Sequence[CostOrders]) -> str:
    heads = [f"{r.model.split(DITHERED)[0]}, {what}" for r in found for what in ("matrices", "layers")]
    rows = [
        (name, *(ranked(*r.correlation(name, by_layer)) for r in found for by_layer in (False, True)))
        for name in COSTS[:-1]
    ]
    return table(("cost", *heads), rows)


def _bytes(found: Sequence[CostOrders]) -> str:
    cells = [(r, text) for r in found for text in r.texts]
    heads = [f"{r.model.split(DITHERED)[0]}, {Path(t.measured_on.text).stem}, {r.bits:g} bits" for r, t in cells]
    return table(("types by", *heads), [(name, *(_share(text, name) for _, text in cells)) for name in COSTS])


def _share(text: OnText, name: str) -> str:
    """The KL of Fisher's types; of the others' the mean as a multiple of it, with its interval."""
    kl, base = text.kl(name), text.kl(FISHER)
    if name == FISHER:
        return f"{short(float(base.mean()))} nats"
    return f"× {quotient(kl, base)[1]}"


if __name__ == "__main__":
    run_command(main, HERE / "{model}.json", written)
