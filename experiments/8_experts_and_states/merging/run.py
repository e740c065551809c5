"""Experts that leave the small mixture, dropped or merged into those that stay: KL and perplexity on unseen text.

    python experiments/8_experts_and_states/merging/run.py [--model MODEL]

Train the mixture first (small_models). Writes merging.json beside this file.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import silu
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, run_command
from experiments.small import MODELS, Changed, changed, gone, keep, kl_of, over
from experiments.statements import bullets, mean, table
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.mixtures import find_mixtures
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles import expert_use

HERE = Path(__file__).parent
FILE = HERE / "merging.json"
REMOVED, FEW = (1, 2, 4), 1024
CRITERIA = ("reap", "frequency", "kl")
DROPPED, MERGED = "dropped", "merged"
Expert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # gate and up (I × d) and down (d × I)


def main(model: Model = Model(str(MODELS / "mixture"))) -> None:
    torch.set_num_threads(1)
    with changed(model, "merging") as found:
        dense, text = found.given.loaded.model, found.given.calibration
        few = replace(text, ids=text.ids[: FEW // text.context])
        tokens, states = expert_use(dense, text).tokens, entering(dense, few.ids)
        names = []
        for criterion in CRITERIA:
            ranking = None
            for count in REMOVED:
                own = [f"{count} by {criterion}, {how}" for how in (DROPPED, MERGED)]
                names += own
                if all(name in found.store for name in own):
                    continue
                ranking = ranking or lp.rank(
                    dense, few if criterion == "kl" else text, criterion=criterion, what="experts"
                )
                add(found, own, ranking.plan(count), tokens, states)
        keep(FILE, found, names)


def add(found: Changed, names: list[str], plan: lp.PruningPlan, tokens: np.ndarray, states: Any) -> None:
    dense = found.given.loaded.model
    for name, into in zip(names, ({}, groups(dense, plan, states)), strict=True):
        listed = {"experts": gone(plan)["experts"], "into": {i: list(g) for i, g in into.items()}}

        def make(into: Any = into, listed: Any = listed) -> tuple[PreTrainedModel, dict[str, Any]]:
            return merged(dense, plan, into, tokens), listed

        found.add(name, make)


@torch.no_grad()
def entering(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """What enters the experts of each layer, T × d float64, for all tokens of `ids` (windows × tokens)."""
    structure, seen = find_structure(model), dict[int, list[torch.Tensor]]()

    def hook_of(layer: int) -> Any:
        return lambda module, args, kwargs: seen.setdefault(layer, []).append(args[0].double())

    modules = {i: structure.layers[i].get_submodule(m.experts) for i, m in find_mixtures(structure).layers.items()}
    with hooked(before=[(module, hook_of(i)) for i, module in modules.items()]):
        for window in ids:
            model(window.unsqueeze(0), use_cache=False)
    return {i: torch.cat(parts).flatten(0, -2) for i, parts in seen.items()}


@torch.no_grad()
def groups(model: PreTrainedModel, plan: lp.PruningPlan, states: dict[int, torch.Tensor]) -> dict[int, tuple[int, ...]]:
    """For every expert that leaves a layer, in the order of `plan`: the expert that stays and whose output is nearest.

    Near is a large cosine between the outputs of two experts for all tokens of `states`, whoever gets them.
    """
    into = {}
    for layer, leaving in plan.gone.experts_gone.items():
        outputs = torch.stack([output(*parts, states[layer]).flatten() for parts in matrices(model, layer)])
        outputs = torch.nn.functional.normalize(outputs, dim=1)
        near = outputs @ outputs.T
        near[:, list(leaving)] = -torch.inf
        into[layer] = tuple(near[list(leaving)].argmax(1).tolist())
    return into


@torch.no_grad()
def merged(
    model: PreTrainedModel, plan: lp.PruningPlan, into: dict[int, tuple[int, ...]], tokens: np.ndarray
) -> PreTrainedModel:
    """`model` without the experts of `plan`, each merged `into` one that stays, by the `tokens` (L, E) that each got.

    The merged matrices are means, weighted by tokens, after the hidden channels of every member were put into the
    order of the expert that stays (`aligned`). The router keeps the row of that expert.
    """
    pruned = lp.remove_layers(model, plan)
    for layer, stays in into.items():
        leaving, parts = plan.gone.experts_gone[layer], matrices(model, layer)
        kept = [e for e in range(len(parts)) if e not in leaving]
        experts: Any = find_structure(pruned).layers[layer].get_submodule("mlp.experts")
        for expert in set(stays):
            members = [(expert, parts[expert])]
            members += [
                (g, aligned(parts[g], parts[expert])) for g, e in zip(leaving, stays, strict=True) if e == expert
            ]
            share = tokens[layer, [e for e, _ in members]] + 1e-9  # nobody may have got a token
            gate, up, down = (
                sum(w * each[k] for w, (_, each) in zip(share / share.sum(), members, strict=True)) for k in range(3)
            )
            experts.gate_up_proj[kept.index(expert)] = torch.cat([gate, up])
            experts.down_proj[kept.index(expert)] = down
    return pruned


def matrices(model: PreTrainedModel, layer: int) -> list[Expert]:
    """The matrices of every expert in float64."""
    experts: Any = find_structure(model).layers[layer].get_submodule("mlp.experts")
    gate, up = experts.gate_up_proj.detach().double().chunk(2, dim=1)
    return list(zip(gate, up, experts.down_proj.detach().double(), strict=True))


def aligned(parts: Expert, like: Expert) -> Expert:
    """An expert with its hidden channels in the order in which they are nearest to those of `like`.

    The order has the largest sum of inner products of channels, over all three matrices (linear assignment).
    """
    gain = torch.cat([*like[:2], like[2].T], 1) @ torch.cat([*parts[:2], parts[2].T], 1).T
    order = torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])
    return parts[0][order], parts[1][order], parts[2][:, order]


def output(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def written() -> dict[str, str]:
    of = json.loads(FILE.read_text(encoding="utf-8"))
    rows, dense = of["changed"], of["dense"]
    lines = []
    for count in REMOVED:
        for criterion in CRITERIA:
            dropped, into = (rows[f"{count} by {criterion}, {how}"] for how in (DROPPED, MERGED))
            apart = np.subtract(into["kl"], dropped["kl"])
            lines.append(
                (
                    f"{count} of 8",
                    f"`{criterion}`",
                    kl_of([dropped]),
                    kl_of([into]),
                    mean(apart),
                    over(dropped, dense),
                    over(into, dense),
                )
            )
    quotient = "perplexity over the dense model's"
    head = ("experts that leave every layer", "by", "KL, dropped", "KL, merged", "merged less dropped")
    apart = [
        interval_of(np.subtract(rows[name.replace(DROPPED, MERGED)]["kl"], rows[name]["kl"]))
        for name in rows
        if name.endswith(DROPPED)
    ]
    return {
        "setting": bullets(f"{of['measured on']}; calibrated on {of['calibrated on']}"),
        "table": table((*head, f"{quotient}, dropped", f"{quotient}, merged"), lines),
        "better": str(sum(high < 1 for _, high in apart)),
        "worse": str(sum(low > 1 for low, _ in apart)),
    }


if __name__ == "__main__":
    run_command(main, FILE, written)
