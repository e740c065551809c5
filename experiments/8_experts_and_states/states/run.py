"""The small hybrid: errors along depth and along time; without layers, and compressed.

    python experiments/8_experts_and_states/states/run.py [--model MODEL]

Train the hybrid first (small_models). Writes states.json beside this file.
"""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.along_time import along_time
from experiments.common import Model, run_command
from experiments.small import MODELS, Changed, changed, keep, kl_of, over
from experiments.statements import bullets, interval, short, table

HERE = Path(__file__).parent
FILE = HERE / "states.json"
REMOVED, CRITERIA = (1, 2, 3), ("bi", "rho", "angular", "kl")
AFTER = (1, 4, 16)
HALF = ("magnitude", "wanda", "sparsegpt")


def main(model: Model = Model(str(MODELS / "hybrid"))) -> None:
    torch.set_num_threads(1)
    with changed(model, "states") as found:
        names = [*removed(found), *compressed(found)]
        keep(FILE, found, names, along=along(found))


def removed(found: Changed) -> list[str]:
    model, text = found.given.loaded.model, found.given.calibration
    names = []
    for criterion in CRITERIA:
        for count in REMOVED:

            def make(criterion: str = criterion, count: int = count) -> tuple[PreTrainedModel, dict[str, Any]]:
                plan = lp.rank(model, text, criterion=criterion, remove=count).plan(count)
                return lp.remove_layers(model, plan), {"layers": list(plan.remove)}

            with suppress(lp.LyapunovPruneError):  # both attentions chosen: then the cache counts no positions
                found.add(f"{count} layers by {criterion}", make)
                names.append(f"{count} layers by {criterion}")
    return names


def compressed(found: Changed) -> list[str]:
    given = found.given
    for method in HALF:

        def make(method: str = method) -> tuple[PreTrainedModel, dict[str, Any]]:
            return lp.compress(given.loaded.model, given.calibration, method=method, sparsity=0.5).model, {}

        found.add(f"half: {method}", make)
    return [f"half: {method}" for method in HALF]


def along(found: Changed) -> dict[str, Any]:
    """ρ of every layer along depth, and of those with a state along time, on the evaluation text."""
    if "along" not in found.store:
        given = found.given
        few = replace(given.evaluation, ids=given.evaluation.ids[:8])
        depth, time = lp.measure_contraction(given.loaded.model, few), along_time(given.loaded, few)
        found.store.add(
            "along",
            {
                "depth": depth.rho.tolist(),
                "depth interval": depth.rho_interval.tolist(),
                "measured on": depth.measured_on.line(),
                "layers": list(time.layers),
                "time": time.rho.tolist(),
                "time interval": time.rho_interval.tolist(),
                "half life": time.half_life.tolist(),
                "left": time.left.tolist(),
                "bound": time.bound.tolist(),
            },
        )
    return found.store["along"]


def written() -> dict[str, str]:
    of = json.loads(FILE.read_text(encoding="utf-8"))
    rows, dense, errors = of["changed"], of["dense"], of["along"]

    def line(label: str, row: dict[str, Any]) -> tuple[str, str, str]:
        return label, kl_of([row]), over(row, dense)

    layers: list[tuple[object, ...]] = []
    for count in REMOVED:
        for criterion in CRITERIA:
            row = rows.get(f"{count} layers by {criterion}")
            what = (
                [", ".join(map(str, row["layers"])), kl_of([row]), over(row, dense)] if row else ["refused", None, None]
            )
            layers.append((count, f"`{criterion}`", *what))
    states = {layer: i for i, layer in enumerate(errors["layers"])}
    left, bound = np.array(errors["left"]), np.array(errors["bound"])
    after = [k for k in AFTER if k < left.shape[1]]
    rhos = []
    for layer, rho in enumerate(errors["depth"]):
        depth = interval(rho, *errors["depth interval"][layer])
        if layer not in states:
            rhos.append((layer, "attention", depth, *[None] * (2 + len(after))))
            continue
        i = states[layer]
        rhos.append(
            (
                layer,
                "Mamba-2",
                depth,
                interval(errors["time"][i], *errors["time interval"][i]),
                errors["half life"][i],
                *(f"{short(left[i, k])} ≤ {short(bound[i, k])}" for k in after),
            )
        )
    head = ("KL", "perplexity over the dense model's")
    return {
        "setting": bullets(
            f"{of['measured on']}; calibrated on {of['calibrated on']}",
            f"along depth and time: {errors['measured on']}",
        ),
        "layers": table(("removed", "by", "layers", *head), layers),
        "along": table(
            (
                "layer",
                "mixer",
                "ρ along depth",
                "ρ along time",
                "half-life, tokens",
                *(f"left after {k}" for k in after),
            ),
            rhos,
        ),
        "half": table(("half of the weights by", *head), [line(f"`{m}`", rows[f"half: {m}"]) for m in HALF]),
    }


if __name__ == "__main__":
    run_command(main, FILE, written)
