"""The small mixture without experts, without layers, compressed and healed: KL and perplexity on unseen text.

    python experiments/8_experts_and_states/experts/run.py [--model MODEL]

Train the mixture first (small_models). Writes experts.json beside this file.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, run_command
from experiments.small import MODELS, Changed, changed, gone, keep, kl_of, over
from experiments.statements import bullets, counted, percent, short, table
from lyapunov_prune.bounds.check import check_written
from lyapunov_prune.models.mixtures import find_mixtures
from lyapunov_prune.profiles import expert_use
from lyapunov_prune.pruning.removed import ExpertsGone

HERE = Path(__file__).parent
FILE = HERE / "experts.json"
REMOVED, LOTS, KL_TOKENS, CHECKED = (1, 2, 4), range(4), 1024, (2, 64)
CRITERIA = ("reap", "frequency", "kl")
COMPRESSED = {
    "half of the weights": ({"sparsity": 0.5}, ("magnitude", "wanda", "sparsegpt")),
    "3 bits": ({"bits": 3}, ("rtn", "gptq", "gptq, corrected")),
    "low rank, 30 % fewer parameters": ({"sparsity": 0.3}, ("svd", "whitened-svd", "balanced")),
}
HEALED = ("2 experts by reap", "2 layers by kl")
HEALING: dict[str, Any] = {"steps": 40, "rank": 8, "per_step": 2}


def main(model: Model = Model(str(MODELS / "mixture"))) -> None:
    torch.set_num_threads(1)
    with changed(model, "experts") as found:
        names = [*removed(found), *compressed(found), *healed(found)]
        keep(FILE, found, names, checks=bounds(found), use=use(found))


def removed(found: Changed) -> list[str]:
    """Experts of every layer removed by each criterion and by lot, and layers by kl."""
    model, text = found.given.loaded.model, found.given.calibration
    few = replace(text, ids=text.ids[: KL_TOKENS // text.context])
    decoder = found.given.loaded
    mixtures = find_mixtures(decoder.structure)
    names = []
    for what in ("experts", "layers"):
        for criterion in CRITERIA if what == "experts" else ("kl",):
            ranking = None
            for count in REMOVED:
                names.append(f"{count} {what} by {criterion}")
                if names[-1] in found.store:
                    continue
                ranking = ranking or lp.rank(model, few if criterion == "kl" else text, criterion=criterion, what=what)
                plan = ranking.plan(count)
                found.add(names[-1], lambda plan=plan: (lp.remove_layers(model, plan), gone(plan)))
    for count in REMOVED:
        for lot in LOTS:
            names.append(f"{count} experts by lot {lot}")
            generator = torch.Generator().manual_seed(lot)
            drawn = {
                layer: tuple(sorted(torch.randperm(mixtures.router.experts, generator=generator)[:count].tolist()))
                for layer in mixtures.layers
            }
            plan = lp.PruningPlan.given(model, ExpertsGone((), drawn))
            found.add(names[-1], lambda plan=plan: (lp.remove_layers(model, plan), gone(plan)))
    return names


def compressed(found: Changed) -> list[str]:
    names = []
    for how, (amount, methods) in COMPRESSED.items():
        for method in methods:
            names.append(f"{how}: {method}")
            options = {"correction": 0.5} if "corrected" in method else {}

            def make(method: str = method, amount: Any = amount, options: Any = options) -> Any:
                name = method.partition(",")[0]
                done = lp.compress(found.given.loaded.model, found.given.calibration, method=name, **amount, **options)
                return done.model, {"lent": sum(m.lent for m in done.report.matrices)}

            found.add(names[-1], make)
    return names


def healed(found: Changed) -> list[str]:
    """Low-rank healing of what lost experts or layers, on the text that they were chosen by."""
    model, text = found.given.loaded.model, found.given.calibration
    names = []
    for cut in HEALED:
        names.append(f"{cut}, healed")

        def make(cut: str = cut) -> tuple[PreTrainedModel, dict[str, Any]]:
            lost = found.store[cut]
            experts = {layer: tuple(each) for layer, each in enumerate(lost["experts"]) if each}
            goes = ExpertsGone(tuple(lost["layers"]), experts) if experts else lost["layers"]
            student = lp.remove_layers(model, lp.PruningPlan.given(model, goes))
            done = lp.heal(student, model, text, **HEALING)
            return done.model, {"kept": done.report.kept}

        found.add(names[-1], make)
    return names


def use(found: Changed) -> dict[str, float]:
    """The least and the largest share of the choices of its layer that any expert gets."""
    if "use" not in found.store:
        measured = expert_use(found.given.loaded.model, found.given.calibration)
        share = measured.share(measured.tokens)
        found.store.add("use", {"least": float(share.min()), "most": float(share.max())})
    return found.store["use"]


def bounds(found: Changed) -> dict[str, int]:
    """The bounds of every matrix of the model that Wanda has halved, on a few tokens that no method has seen."""
    if "checks" not in found.store:
        given = found.given
        small = lp.compress(given.loaded.model, given.calibration, method="wanda", sparsity=0.5).model
        few = replace(given.evaluation, ids=given.evaluation.ids[: CHECKED[0], : CHECKED[1]])
        report = check_written(given.loaded.model, small, few)
        counted_here = {"bounds": report.checks, "violated": len(report.violations), "matrices": len(report.names)}
        found.store.add("checks", counted_here | {"unseen": len(report.unseen)})
    return found.store["checks"]


def written() -> dict[str, str]:
    of = json.loads(FILE.read_text(encoding="utf-8"))
    rows, dense = of["changed"], of["dense"]
    lots = {count: [rows[f"{count} experts by lot {lot}"] for lot in LOTS] for count in REMOVED}

    def line(label: str, row: dict[str, Any]) -> tuple[str, str, str]:
        return label, kl_of([row]), over(row, dense)

    experts = [
        (f"{count} of 8", *line(f"`{criterion}`", rows[f"{count} experts by {criterion}"]))
        for count in REMOVED
        for criterion in CRITERIA
    ]
    experts += [(f"{count} of 8", f"by lot, mean of {len(lots[count])}", kl_of(lots[count]), None) for count in REMOVED]
    order = {"`reap`": 0, "`frequency`": 1, "`kl`": 2}
    experts.sort(key=lambda row: (row[0], order.get(row[1], 3)))
    equal = [
        (counted(count, what[:-1]), short(rows[name]["parameters"] / of["parameters"]), *line(f"`{by}`", rows[name]))
        for count in REMOVED
        for what, by in (("experts", "reap"), ("experts", "kl"), ("layers", "kl"))
        for name in [f"{count} {what} by {by}"]
    ]
    methods = [
        (how, *line(f"`{method.partition(',')[0]}`{', corrected' if ',' in method else ''}", rows[f"{how}: {method}"]))
        for how, (_, names) in COMPRESSED.items()
        for method in names
    ]
    healing = [line(name, rows[name]) for cut in HEALED for name in (cut, f"{cut}, healed")]
    checks = of["checks"]
    quotient = ("KL", "perplexity over the dense model's")
    return {
        "setting": bullets(f"{of['measured on']}; calibrated on {of['calibrated on']}"),
        "experts": table(("experts removed of every layer", "by", *quotient), experts),
        "equal": table(("removed", "parameters kept", "by", *quotient), equal),
        "methods": table(("amount", "method", *quotient), methods),
        "healing": table(("removed", *quotient), healing),
        "checks": f"{checks['bounds']:,} bounds of {checks['matrices']:,} matrices",
        "least": percent(of["use"]["least"]),
        "most": percent(of["use"]["most"]),
        "violated": str(checks["violated"]),
    }


if __name__ == "__main__":
    run_command(main, FILE, written)
