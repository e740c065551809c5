"""The small mixture narrower in every expert, without experts, and without layers, at about equal bytes.

    python experiments/8_experts_and_states/expert_width/run.py [--model MODEL]

Train the mixture first (small_models). Writes expert_width.json beside this file.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, run_command
from experiments.small import MODELS, Changed, changed, gone, keep, kl_of, over
from experiments.statements import bullets, counted, ratio, short, table
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.reading import read
from lyapunov_prune.mending.refit import refit_blocks
from lyapunov_prune.pruning.removed import ChannelsGone
from lyapunov_prune.pruning.surgery import Operation, cut
from lyapunov_prune.pruning.width import choose_channels
from lyapunov_prune.ranking.counts import What

HERE = Path(__file__).parent
FILE = HERE / "expert_width.json"
EIGHTHS, KL_TOKENS = (1, 2, 4), 1024
OTHERS: tuple[tuple[What, str], ...] = (("experts", "reap"), ("experts", "kl"), ("layers", "kl"))


def main(model: Model = Model(str(MODELS / "mixture"))) -> None:
    torch.set_num_threads(1)
    with changed(model, "expert_width") as found:
        keep(FILE, found, [*narrower(found), *fewer(found)])


def narrower(found: Changed) -> list[str]:
    """Channels of every expert removed, cut and refitted on every second window."""
    decoder, text = found.given.loaded, found.given.calibration
    names = []
    for eighths in EIGHTHS:
        for way in ("cut", "refitted"):
            names.append(f"{eighths} eighths of the channels, {way}")

            def make(eighths: int = eighths, way: str = way) -> tuple[PreTrainedModel, dict[str, Any]]:
                plan = choose_channels(decoder, text, eighths / 8)
                fitting = apart(read(decoder, text), of=2, most=None)[0]
                refits = refit_blocks(decoder, plan.gone.kept_channels, fitting)[1] if way == "refitted" else {}
                assert isinstance(plan.gone, ChannelsGone)
                return cut(decoder, Operation(plan, refits=refits)).model, {"channels": plan.gone.fewer}

            found.add(names[-1], make)
    return names


def fewer(found: Changed) -> list[str]:
    """Experts of every layer, or layers, removed by each criterion."""
    model, text = found.given.loaded.model, found.given.calibration
    few = replace(text, ids=text.ids[: KL_TOKENS // text.context])

    @cache
    def ranking(what: What, criterion: str) -> Any:
        return lp.rank(model, few if criterion == "kl" else text, criterion=criterion, what=what)

    names = []
    for what, criterion in OTHERS:
        for count in EIGHTHS:
            names.append(f"{count} {what} by {criterion}")

            def make(what: What = what, criterion: str = criterion, count: int = count) -> tuple[PreTrainedModel, Any]:
                plan = ranking(what, criterion).plan(count)
                return lp.remove_layers(model, plan), gone(plan)

            found.add(names[-1], make)
    return names


def written() -> dict[str, str]:
    of = json.loads(FILE.read_text(encoding="utf-8"))
    rows, dense = of["changed"], of["dense"]
    lines = []
    for count in EIGHTHS:
        for way in ("cut", "refitted"):
            row = rows[f"{count} eighths of the channels, {way}"]
            lines.append((f"{row['channels']} of 384 channels of every expert", f"`width`, {way}", row))
        for what, by in OTHERS:
            lines.append((counted(count, what[:-1]), f"`{by}`", rows[f"{count} {what} by {by}"]))
    head = ("removed", "parameters kept", "by", "KL", "perplexity over the dense model's")
    equal = [
        (gone, short(row["parameters"] / of["parameters"]), by, kl_of([row]), over(row, dense))
        for gone, by, row in lines
    ]

    def beside(count: int, other: str) -> str:
        """KL of the refitted width over that of another removal, paired by window."""
        mine, its = (rows[name]["kl"] for name in (f"{count} eighths of the channels, refitted", other))
        return ratio(np.log(mine) - np.log(its))

    return {
        "setting": bullets(f"{of['measured on']}; calibrated on {of['calibrated on']}"),
        "equal": table(head, equal),
        **{f"cut {n}": beside(n, f"{n} eighths of the channels, cut") for n in EIGHTHS},
        **{f"experts {n}": beside(n, f"{n} experts by kl") for n in EIGHTHS},
        **{f"layers {n}": beside(n, f"{n} layers by kl") for n in EIGHTHS},
    }


if __name__ == "__main__":
    run_command(main, FILE, written)
