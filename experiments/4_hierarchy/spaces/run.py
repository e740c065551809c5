"""A layer's attention or MLP left out, or pruned: state, logits and probabilities, measured, estimated and bounded.

    python experiments/4_hierarchy/spaces/run.py [--model MODEL]

Figures 4 to 6, 11 and 13 to 21 of the paper. Writes spaces.json and the figures beside this file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from scipy import stats
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, draw, read_text, run_command
from experiments.hierarchies import as_json, cell, encoded, kept, measured_on, opened, records, summarise
from experiments.space_figures import (
    BITS,
    ESTIMATED,
    NAMES,
    PRUNED,
    bounds_figure,
    orthogonal_figure,
    steps_by_layer_figure,
    steps_figure,
    temperatures_figure,
    variances_figure,
)
from experiments.statements import short, signed, span, table
from lyapunov_prune.data.batch import checked_batch
from lyapunov_prune.forward.anatomy import find_anatomy, silent
from lyapunov_prune.forward.hooks import residual_stream, run_backbone
from lyapunov_prune.forward.prefix import Prefix
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.structure import identify
from lyapunov_prune.predictions.spaces import turn
from lyapunov_prune.report.predictions import hierarchy_figure
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.result import MeasuredOn

HERE = Path(__file__).parent
Part = Literal["layer", "attention", "mlp"]
PARTS: tuple[Part, ...] = ("attention", "mlp")
CENTRED, LAST = ("hidden", "logit", "logit_without_mean", "mean_share"), 8
SPARSITY = 0.5  # of Figure 13
BEHIND, BARE = "attention left out, read behind it", "attention left out, read behind it, no final norm"
TEMPERATURES = (0.5, 0.7, 1.5, 2.0)  # besides 1
ARRAYS = [f.name for f in fields(lp.predictions.HierarchyProbe) if f.type == "np.ndarray"]
SPACES = ("hidden", "logit", "probability")
MEASURES = [
    *("hidden", "logit", "probability", "hidden_estimate", "logit_estimate", "probability_estimate"),
    *("hidden_orthogonal", "logit_orthogonal", "kl", "kl_estimate", "range_bound", "uniform_variance"),
]


def main(model: Model = Model(), text: str = "builtin", tokens: int = 2048, steps: int = 32) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    prompts = encoded(loaded)
    at = loaded.structure.num_layers // 2  # of Figures 5, 6 and 11: the 14th of 28 in the paper

    def origin(name: str) -> MeasuredOn:
        return checked_batch(loaded.structure, prompts[name]).measured_on(loaded.model)

    def probes(
        name: str, names: Sequence[str], count: int, what: tuple[Part, ...] = PARTS, **how: Any
    ) -> list[lp.predictions.HierarchyProbe]:
        """Of each prompt: what an earlier run has kept, or a new one."""
        asked = {k: identify(x) if isinstance(x, PreTrainedModel) else x for k, x in how.items()}

        def work(ids: torch.Tensor) -> lp.predictions.HierarchyProbe:
            return lp.probe_layers(loaded.model, ids, steps=count, what=what, **how)

        return [
            kept(
                model.name,
                f"probe-{k}-{count}-{name}",
                lp.predictions.HierarchyProbe,
                origin(k),
                {"steps": count, "what": what, **asked},
                lambda k=k: work(prompts[k]),
            )
            for k in names
        ]

    found = probes("1", list(prompts), steps, temperature=1.0)
    few, short = list(prompts)[::2], steps // 4
    warm = {T: probes(f"{T:g}", few, short, temperature=T) for T in TEMPERATURES}
    rounded = lp.compress(loaded.model, method="rtn", bits=BITS).model
    small = probes(f"rounded-{BITS}", few, short, ("layer",), change=rounded)
    learnt = read_text(loaded, text, tokens, context=512)
    wanda = lp.compress(loaded.model, learnt, method="wanda", sparsity=SPARSITY).model
    pruned = probes("pruned", few, short, change=wanda)
    elsewhere = {
        BEHIND: probes("branch", list(prompts), steps, ("attention",), read_at="branch"),
        BARE: probes("branch-bare", few, short, ("attention",), read_at="branch", final_norm=False),
    }
    whole, frame = pooled(found, loaded, prompts), together(found, prompts)
    layers = summarise(frame, "prompt", ("layer", "what"), MEASURES)
    spread = frame.groupby(["layer", "what"], sort=False)[["hidden", "logit", "probability"]]
    layers = layers.merge(spread.min().add_suffix("_min").reset_index())
    layers = layers.merge(spread.max().add_suffix("_max").reset_index())
    chosen = only(frame, at)
    by_step = summarise(chosen, "prompt", ("step",), MEASURES)
    heated = [chosen[(chosen.step < short) & chosen.prompt.isin(few)].assign(temperature=1.0)]
    heated += [only(together(list_, few), at).assign(temperature=T) for T, list_ in warm.items()]
    temperatures = summarise(pd.concat(heated), "prompt", ("temperature",), MEASURES).sort_values("temperature")
    mean_out = summarise(without_mean(loaded, [prompts[k] for k in few]), "prompt", ("layer",), CENTRED)
    near = together(small, few)
    rounding = summarise(near, "prompt", ("layer",), [m for m in MEASURES if m[0] == "k" or m == "range_bound"])
    within = near.assign(within=near.variance_bound.notna()).groupby("layer")[["variance_bound", "within"]].mean()
    rounding = rounding.merge(within.reset_index())
    thinned = summarise(together(pruned, few), "prompt", ("layer", "what"), MEASURES)
    read = {
        name: summarise(together(list_, prompts if name == BEHIND else few), "prompt", ("layer", "what"), SPACES)
        for name, list_ in elsewhere.items()
    }
    everything = [
        *found,
        *small,
        *pruned,
        *(p for lists in (warm, elsewhere) for list_ in lists.values() for p in list_),
    ]
    facts = {
        "measured on": whole.measured_on.line(),
        "prompts": len(prompts),
        "steps": steps,
        "prompts and steps of the temperatures and the rounding": [len(few), short],
        "layer of the steps and temperatures": at,
        "pruned on": learnt.measured_on(loaded.model).line(),
        "numbers held against a bound": sum(p.checked for p in everything),
        "violations": sum(len(p.violations) for p in everything),
        **accuracy(frame),
        **tightness("left out", frame),
        **tightness(f"rounded to {BITS} bits", near),
    }
    tables = {
        "layers": layers,
        "steps": by_step,
        "temperatures": temperatures,
        f"rounded to {BITS} bits": rounding,
        PRUNED: thinned,
        **read,
        "attention left out, logits without their mean": mean_out,
        "attention left out, step by step": steps_by_layer(frame),
    }
    write_whole(folder / "spaces.json", as_json({**facts, **{k: records(t) for k, t in tables.items()}}))
    draw(
        folder,
        {
            "spaces": hierarchy_figure(whole),
            "pruned": hierarchy_figure(pooled(pruned, loaded, {k: prompts[k] for k in few})),
            "orthogonal": orthogonal_figure(layers),
            "steps": steps_figure(by_step, at),
            "steps_by_layer": steps_by_layer_figure(tables["attention left out, step by step"]),
            "variances": variances_figure(layers),
            "temperatures": temperatures_figure(temperatures, at),
            "bounds": bounds_figure(layers, rounding),
        },
    )


def together(found: Sequence[lp.predictions.HierarchyProbe], prompts: Iterable[str]) -> pd.DataFrame:
    """A row a prompt, layer, part and step."""
    return pd.concat([p.to_frame().assign(prompt=name) for p, name in zip(found, prompts, strict=True)])


def only(frame: pd.DataFrame, at: int) -> pd.DataFrame:
    return frame[(frame.layer == at) & (frame.what == "attention")]


def steps_by_layer(frame: pd.DataFrame) -> pd.DataFrame:
    """Of every layer and measure of Figures 14 to 17 one row: what it was at each step, the attention left out."""
    part = frame[frame.what == "attention"]
    measures = [name for measured in ESTIMATED for name in (measured, f"{measured}_estimate")]
    means = part.groupby(["layer", "step"])[measures].mean()
    rows = [
        {"layer": int(layer), "measure": name, "steps": [float(f"{x:.4g}") for x in means.loc[layer][name]]}
        for layer in means.index.levels[0]
        for name in measures
    ]
    return pd.DataFrame(rows)


def pooled(
    found: list[lp.predictions.HierarchyProbe], loaded: lp.models.Decoder, prompts: dict[str, torch.Tensor]
) -> lp.predictions.HierarchyProbe:
    """One probe of all prompts, as `probe_layers` would make it had they the same length."""
    stacks = {name: np.stack([getattr(p, name) for p in found]) for name in ARRAYS}
    return replace(
        found[0],
        **{name: x.max(0) if name.startswith("deviation") else x.mean(0) for name, x in stacks.items()},
        checked=sum(p.checked for p in found),
        violations=tuple(v for p in found for v in p.violations),
        derived=sum(p.derived for p in found),
        exceeded=sum(p.exceeded for p in found),
        measured_on=measured_on(loaded, prompts),
    )


@torch.no_grad()
def without_mean(loaded: lp.models.Decoder, prompts: Sequence[torch.Tensor]) -> pd.DataFrame:
    """`1 − cos` of the logits less their mean over the vocabulary, which no softmax sees; attention left out.

    At the last `LAST` tokens of each prompt. `mean_share` is that of the mean in `‖z‖²`.
    """
    structure, rows = loaded.structure, []
    anatomy = find_anatomy(loaded, range(structure.num_layers))
    for number, prompt in enumerate(prompts):
        ids = prompt.to(loaded.model.device)
        prefix, scorer = Prefix(structure, ids), Scorer(loaded, ids)
        states: list[torch.Tensor] = []
        with residual_stream(structure, lambda boundary, hidden, states=states: states.append(hidden)):
            run_backbone(structure, ids)

        def logits(
            h: torch.Tensor, ids: torch.Tensor = ids, prefix: Prefix = prefix, scorer: Scorer = scorer
        ) -> torch.Tensor:
            return lift(scorer.logits(prefix.finish(ids, structure.num_layers, h)[0, -LAST:]))

        for layer, found in anatomy.items():
            if "attention" not in found.parts:
                continue
            start = prefix.entry(layer)
            with silent(found.parts["attention"]):
                changed = prefix.advance(ids, start, states[start], layer + 1)
            h, h2 = states[layer + 1][0, -LAST:], changed[0, -LAST:]
            z, z2 = logits(states[layer + 1]), logits(changed)
            middle, middle2 = z.mean(-1, keepdim=True), z2.mean(-1, keepdim=True)
            turned = [turn(a, b)[0] for a, b in ((h, h2), (z, z2), (z - middle, z2 - middle2))]
            share = middle.squeeze(-1).square() * z.shape[-1] / z.square().sum(-1)
            values = [float(x.mean()) for x in (*turned, share)]
            rows.append({"prompt": number, "layer": layer, **dict(zip(CENTRED, values, strict=True))})
    return pd.DataFrame(rows)


def accuracy(frame: pd.DataFrame) -> dict[str, object]:
    """Estimates against measurements, and space against space; over every prompt, layer, part and step."""
    facts: dict[str, object] = {}
    inner = frame[(frame.layer > 0) & (frame.layer < frame.layer.max())]
    for name, part in (("all layers", frame), ("without the first and the last", inner)):
        for measured in ("hidden", "logit", "probability", "kl"):
            estimate = f"{measured}_estimate"
            rows = part[(part[measured] > 0) & (part[estimate] > 0)]
            facts[f"{estimate} / {measured}, {name}: 5 %, median, 95 %"] = quantiles(rows[estimate] / rows[measured])
            rank = stats.spearmanr(rows[measured], rows[estimate]).statistic
            facts[f"{estimate} and {measured}, {name}: rank correlation"] = float(f"{rank:.4g}")
    for what, part in frame.groupby("what", sort=False):
        means = part.groupby("layer")[["hidden", "logit", "probability"]].mean()
        for space, verb, mask in (
            ("logits", "less", means.logit < means.hidden),
            ("probabilities", "more", means.probability > means.hidden),
        ):
            facts[f"{what}: layers where the {space} turn {verb} than the state"] = f"{mask.sum()} of {len(means)}"
    return facts


def tightness(name: str, frame: pd.DataFrame) -> dict[str, object]:
    """How far above the measurement the bounds are; over every prompt, layer, part and step."""
    rows = frame[frame.kl > 0]
    near = rows[rows.variance_bound.notna()]
    facts: dict[str, object] = {
        f"{name}: range bound / KL: 5 %, median, 95 %": quantiles(rows.range_bound / rows.kl),
        f"{name}: share with c <= 1": float(f"{frame.variance_bound.notna().mean():.4g}"),
    }
    if len(near):
        facts[f"{name}: variance bound / KL where c <= 1: 5 %, median, 95 %"] = quantiles(near.variance_bound / near.kl)
    return facts


def quantiles(ratio: pd.Series) -> list[float]:
    return [float(f"{x:.4g}") for x in ratio.quantile([0.05, 0.5, 0.95])]


def written(folder: Path = HERE) -> dict[str, str]:
    found = opened(folder / "spaces.json")
    return {
        "setting": setting(found),
        "similarity": similarity(found["layers"], found["layer of the steps and temperatures"]),
        "estimates": estimates(found),
        "variances": variances(found["layers"]),
        "pruned": pruned_parts(found),
        "exits": exits(found),
        "bounds": bounds(found),
        "turned": turned(found["layers"]),
        "temperatures": temperatures(found),
        **numbers(found),
    }


def setting(found: dict[str, Any]) -> str:
    prompts, tokens = found["prompts and steps of the temperatures and the rounding"]
    return (
        f"{found['measured on']}.\n{len(found['steps'])} tokens from each of the {found['prompts']} prompts; "
        f"temperatures and rounding: {prompts} prompts, {tokens} tokens. Intervals are 95 %, bootstrapped over "
        "prompts.\n"
    )


def middle(layers: pd.DataFrame) -> pd.DataFrame:
    """Without the first two layers and the last two, which are exceptions."""
    return layers[(layers.layer > 1) & (layers.layer < layers.layer.max() - 1)]


def similarity(layers: pd.DataFrame, at: int) -> str:
    """Cosines where a part is left out: of the first layer, the middle ones from lowest to highest mean, two more."""
    rows: list[list[object]] = []
    for what, part in layers.groupby("what", sort=False):
        inner = middle(part)
        for layer in (0, None, at, part.layer.max()):
            row = part[part.layer == layer]
            if layer is None:
                cells: list[object] = [span(1 - inner[space]) for space in SPACES]
                rows.append([f"{NAMES[what]}, layers {inner.layer.min()} to {inner.layer.max()}", *cells])
                rows[-1].append(float(1 - inner.probability_max.max()))
            else:
                cells = [cell(row.iloc[0], space, lambda x: 1 - x) for space in SPACES]
                rows.append([f"{NAMES[what]}, layer {layer}", *cells, float(1 - row.probability_max.iloc[0])])
    return table(["left out", "state h", "logits z", "probabilities p", "lowest p of a step"], rows)


def inner_quantiles(found: dict[str, Any], measure: str) -> tuple[float, float, float]:
    return found[f"{measure}_estimate / {measure}, without the first and the last: 5 %, median, 95 %"]


def estimates(found: dict[str, Any]) -> str:
    names = {"hidden": "1 − cos of h", "logit": "1 − cos of z", "probability": "1 − cos of p", "kl": "KL(p‖q)"}
    rank = "{0}_estimate and {0}, without the first and the last: rank correlation"
    return table(
        ["estimate / measured, every step of the inner layers", "5 %", "median", "95 %", "rank correlation"],
        [[label, *inner_quantiles(found, name), found[rank.format(name)]] for name, label in names.items()],
    )


def variances(layers: pd.DataFrame) -> str:
    """Figures 19 to 21: the variances of Δz, and Var_r over the squared parts of the change across h and across z."""
    rows: list[list[object]] = []
    for what, part in layers.groupby("what", sort=False):
        inner = middle(part)
        shown = ((f"layer {n}", part[part.layer == n]) for n in (0, part.layer.max()))
        for name, some in (*shown, (f"layers {inner.layer.min()} to {inner.layer.max()}, median", inner)):
            variance = 2 * some.probability_estimate
            across = (variance / (2 * some[f"{space}_estimate"]) for space in ("hidden", "logit"))
            each = (variance, 2 * some.kl_estimate, some.uniform_variance)
            rows.append([f"{NAMES[what]}, {name}", *(float(x.median()) for x in (*each, *across))])
    head = ["left out", "Var_r(Δz)", "Var_p(Δz)", "Var(Δz)", "Var_r / (‖Δh⊥‖/‖h‖)²", "Var_r / (‖Δz⊥‖/‖z‖)²"]
    return table(head, rows)


def pruned_parts(found: dict[str, Any]) -> str:
    """Figure 13: how far a part of a layer that is pruned turns each space, beside the same part left out."""
    rows: list[list[object]] = []
    for what, (thinned, gone) in by_part(found).items():
        inner = middle(thinned)
        for name, some in ((f"layers {inner.layer.min()} to {inner.layer.max()}", inner), ("all layers", thinned)):
            share = [float((some[space] / gone[space][some.index]).median()) for space in SPACES]
            medians = (float(some[space].median()) for space in SPACES)
            rows.append([f"{NAMES[what]}, {name}", *medians, *share, *counts(some)])
    over = (f"{x} over left out" for x in "hzp")
    head = ["pruned", *(f"1 − cos of {x}" for x in "hzp"), *over, "z less than h", "p more than h"]
    return table(head, rows)


def exits(found: dict[str, Any]) -> str:
    """How far an attention that is left out turns each space, by where the state is read, medians of inner layers."""
    rows = []
    for name, part in (("where the layer ends", found["layers"]), *((n, found[n]) for n in (BEHIND, BARE))):
        attention = part[part.what == "attention"]
        medians = [float(middle(attention)[space].median()) for space in SPACES]
        label = name.removeprefix("attention left out, read ")
        rows.append([label, *medians, *counts(attention)])
    return table(["state read", *(f"1 − cos of {x}" for x in "hzp"), "z less than h", "p more than h"], rows)


def by_part(found: dict[str, Any]) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    """The attention and the MLP of every layer, pruned and left out."""
    frames = [found[name] for name in (PRUNED, "layers")]
    return {what: tuple(f[f.what == what].set_index("layer", drop=False) for f in frames) for what in PARTS}


def bounds(found: dict[str, Any]) -> str:
    rows = []
    for change, words in (("left out", "a part left out"), (f"rounded to {BITS} bits", f"rounded to {BITS} bits")):
        within = f"{short(100 * found[f'{change}: share with c <= 1'])} % of the steps (c ≤ 1)"
        rows.append([f"range bound, {words}", *found[f"{change}: range bound / KL: 5 %, median, 95 %"], "every step"])
        near = found.get(f"{change}: variance bound / KL where c <= 1: 5 %, median, 95 %", [None] * 3)
        rows.append([f"variance bound, {words}", *near, within])
    return table(["bound / measured", "5 %", "median", "95 %", "speaks of"], rows)


def turned(layers: pd.DataFrame) -> str:
    """At how many layers the spaces turn in the paper's order, and by how much, medians of the inner layers."""
    rows = []
    for what, part in layers.groupby("what", sort=False):
        inner = middle(part)
        over = inner.probability / inner.hidden, inner.hidden_orthogonal / inner.logit_orthogonal
        rows.append([NAMES[what], *counts(part), *(float(x.median()) for x in over)])
    head = ["left out", "z turns less than h", "p more than h", "p / h, median", "part across: h / z, median"]
    return table(head, rows)


def counts(part: pd.DataFrame) -> list[str]:
    """At how many layers the logits turn less than the state, and the probabilities more."""
    found = part.logit < part.hidden, part.probability > part.hidden
    return [f"{x.sum()} of {len(part)}" for x in found]


def temperatures(found: dict[str, Any]) -> str:
    rows = found["temperatures"].set_index("temperature")
    over = [rows[f"{measure}_estimate"] / rows[measure] for measure in ("probability", "kl")]
    return table(
        ["T", "estimate / measured, 1 − cos(p, q)", "KL(p‖q)"], [[T, *(float(x[T]) for x in over)] for T in rows.index]
    )


def numbers(found: dict[str, Any]) -> dict[str, str]:
    attention = found["layers"][found["layers"].what == "attention"]
    inner = middle(found["attention left out, logits without their mean"])
    return {
        "checked": f"{found['numbers held against a bound']:,}",
        "violations": str(found["violations"]),
        "mean-share": span(100 * inner.mean_share),
        "with-mean": short(float((inner.hidden / inner.logit).median())),
        "without-mean": short(float((inner.hidden / inner.logit_without_mean).median())),
        "depth": signed(float(stats.spearmanr(attention.layer, attention.kl).statistic)),
    }


if __name__ == "__main__":
    run_command(main, HERE / "spaces.json", written)
