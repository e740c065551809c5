"""A layer's attention or MLP left out, or pruned: state, logits and probabilities, measured, estimated and bounded.

    python experiments/4_hierarchy/spaces/run.py [--model MODEL]

Figures 4 to 6, 11 and 13 to 21 of the paper. Writes spaces.json and the figures beside this file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer
from scipy import stats
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Device, DType, draw, load, of_model, read_text
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
from experiments.statements import bullets, short, span, stated, table, verdict
from lyapunov_prune.data.batch import as_batch
from lyapunov_prune.forward.hooks import residual_stream, run_backbone
from lyapunov_prune.forward.prefix import Prefix
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.forward.sublayers import find_sublayers, silent
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.structure import identify
from lyapunov_prune.predictions.spaces import turn
from lyapunov_prune.report.predictions import hierarchy_figure
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.result import MeasuredOn

HERE = Path(__file__).parent
PARTS = tuple(NAMES)
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


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 2048,
    steps: int = 32,
) -> None:
    folder = of_model(HERE, model)
    loaded = load(model, device, dtype)
    prompts = encoded(loaded)
    at = loaded.structure.num_layers // 2  # of Figures 5, 6 and 11: the 14th of 28 in the paper

    def origin(name: str) -> MeasuredOn:
        return as_batch(loaded.model, prompts[name]).measured_on(loaded.model)

    def probes(
        name: str, names: Sequence[str], count: int, what: tuple[str, ...] = PARTS, **how: Any
    ) -> list[lp.predictions.HierarchyProbe]:
        """Of each prompt: what an earlier run has kept, or a new one."""
        asked = {k: identify(x) if isinstance(x, PreTrainedModel) else x for k, x in how.items()}

        def work(ids: torch.Tensor) -> lp.predictions.HierarchyProbe:
            return lp.probe_layers(loaded.model, ids, steps=count, what=what, **how)

        return [
            kept(
                model,
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
    for name, value in facts.items():
        print(f"{name:<44} {value}")
    shown = ["layer", "what", "hidden", "logit", "probability", "probability_estimate", "kl", "kl_estimate"]
    print(layers[shown].to_string(index=False, float_format=lambda x: f"{x:.3g}"))
    print(temperatures[["temperature", *shown[4:]]].to_string(index=False, float_format=lambda x: f"{x:.3g}"))


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
    parts = find_sublayers(loaded, range(structure.num_layers))
    for number, ids in enumerate(prompts):
        prefix, scorer = Prefix(structure, ids), Scorer(loaded, ids)
        states: list[torch.Tensor] = []
        with residual_stream(structure, lambda boundary, hidden, states=states: states.append(hidden)):
            run_backbone(structure, ids)

        def logits(
            h: torch.Tensor, ids: torch.Tensor = ids, prefix: Prefix = prefix, scorer: Scorer = scorer
        ) -> torch.Tensor:
            return lift(scorer.logits(prefix.finish(ids, structure.num_layers, h)[0, -LAST:]))

        for layer, found in parts.items():
            if "attention" not in found.branches:
                continue
            start = prefix.entry(layer)
            with silent(found.branches["attention"]):
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
        "checked": checked(found),
        "bounds": bounds(found),
        "verdict": against_the_paper(found),
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
            rows.append([f"{NAMES[what]}, {name}", *(float(some[space].median()) for space in SPACES), *share])
    head = ["pruned", *(f"1 − cos of {x}" for x in "hzp"), *(f"{x} over left out" for x in "hzp")]
    return table(head, rows)


def exits(found: dict[str, Any]) -> str:
    """How far an attention that is left out turns each space, by where the state is read, medians of inner layers."""
    rows = []
    for name, part in (("where the layer ends", found["layers"]), *((n, found[n]) for n in (BEHIND, BARE))):
        attention = part[part.what == "attention"]
        less = (attention.logit < attention.hidden).sum()
        more = (attention.probability > attention.hidden).sum()
        turned = [float(middle(attention)[space].median()) for space in SPACES]
        label = name.removeprefix("attention left out, read ")
        rows.append([label, *turned, *(f"{n} of {len(attention)}" for n in (less, more))])
    return table(["state read", *(f"1 − cos of {x}" for x in "hzp"), "z less than h", "p more than h"], rows)


def by_part(found: dict[str, Any]) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    """The attention and the MLP of every layer, pruned and left out."""
    frames = [found[name] for name in (PRUNED, "layers")]
    return {what: tuple(f[f.what == what].set_index("layer", drop=False) for f in frames) for what in PARTS}


def checked(found: dict[str, Any]) -> str:
    violations = found["violations"]
    said = "**no violation**" if violations == 0 else f"**{violations:,} violations**"
    return f"{found['numbers held against a bound']:,} numbers were held against a proven bound of KL(p‖q): {said}.\n"


def bounds(found: dict[str, Any]) -> str:
    rows = []
    for change, words in (("left out", "a part left out"), (f"rounded to {BITS} bits", f"rounded to {BITS} bits")):
        within = f"{short(100 * found[f'{change}: share with c <= 1'])} % of the steps (c ≤ 1)"
        rows.append([f"range bound, {words}", *found[f"{change}: range bound / KL: 5 %, median, 95 %"], "every step"])
        near = found.get(f"{change}: variance bound / KL where c <= 1: 5 %, median, 95 %", [None] * 3)
        rows.append([f"variance bound, {words}", *near, within])
    return table(["bound / measured", "5 %", "median", "95 %", "speaks of"], rows)


def against_the_paper(found: dict[str, Any]) -> str:
    at, layers = found["layer of the steps and temperatures"], found["layers"]
    parts = {what: layers[layers.what == what].set_index("layer", drop=False) for what in PARTS}
    return bullets(
        *of_spaces(parts, at),
        *of_estimates(found, parts),
        of_the_mean(found),
        of_the_variance(parts),
        of_equal_weights(parts),
        of_depth(parts["attention"]),
        of_the_pruned(found),
        of_exits(found),
        of_temperatures(found, at),
    )


def of_spaces(parts: dict[str, pd.DataFrame], at: int) -> list[str]:
    """Logits turn less than the state and probabilities more; the part across the vector shrinks from h to z."""
    inner = {what: middle(part) for what, part in parts.items()}
    rows = f"layers {inner['mlp'].layer.min()} to {inner['mlp'].layer.max()}"

    def medians(over: str, under: str) -> list[float]:
        return [float((part[over] / part[under]).median()) for part in inner.values()]

    less = {what: int((part.logit < part.hidden).sum()) for what, part in parts.items()}
    more = {what: int((part.probability > part.hidden).sum()) for what, part in parts.items()}
    turned = [", ".join(f"{n} of {len(parts[w])} {NAMES[w]}s" for w, n in counts.items()) for counts in (less, more)]
    most = all(2 * n > len(parts[what]) for counts in (less, more) for what, n in counts.items())
    times, shrinks = medians("probability", "hidden"), medians("hidden_orthogonal", "logit_orthogonal")
    one = parts["attention"].loc[at]
    return [
        verdict(
            most,
            f"logits turn less than the state ({turned[0]}), probabilities more ({turned[1]}; in the median of {rows} "
            f"{' and '.join(map(short, times))} times as much, attention and MLP).",
        ),
        verdict(
            min(shrinks) > 1,
            f"the part of the change across the vector shrinks from h to z: at the attention of layer {at} from "
            f"{short(one.hidden_orthogonal)} to {short(one.logit_orthogonal)}; in the median of {rows} by "
            f"{' and '.join(map(short, shrinks))} times (attention and MLP).",
        ),
    ]


def of_estimates(found: dict[str, Any], parts: dict[str, pd.DataFrame]) -> list[str]:
    kl, p = (inner_quantiles(found, measure) for measure in ("kl", "probability"))
    first = [part.loc[0] for part in parts.values()]
    beyond, mlp = [float(row.probability_estimate) for row in first], first[-1]
    return [
        verdict(
            abs(kl[1] - 1) < 0.1,
            f"the estimate of KL follows: in the median {short(kl[1])} of what is measured, and from {short(kl[0])} to "
            f"{short(kl[2])} times it in nine of ten steps.",
        ),
        verdict(
            max(1 / p[0], p[2]) < 2 and max(beyond) <= 1,
            f"the estimate of 1 − cos(p, q) is {short(p[0])} to {short(p[2])} times what is measured in nine of ten "
            f"steps, and at layer 0 it reads {' and '.join(map(short, beyond))} (attention and MLP), where what is "
            f"measured cannot exceed 1. That of h reads {short(mlp.hidden_estimate)} at the MLP of layer 0"
            f"{', which makes nearly all of the state' if mlp.hidden > 0.9 else ''}: measured {short(mlp.hidden)}.",
        ),
    ]


def of_the_variance(parts: dict[str, pd.DataFrame]) -> str:
    """Theorem 2: the variance beside the squared part of the change across the state, last layer and inner ones."""
    last, inner = [], []
    for part in parts.values():
        over = part.probability_estimate / part.hidden_estimate
        last.append(float(over.iloc[-1]))
        inner.append(float(over[middle(part).index].median()))
    return verdict(
        min(inner) > 1 and all(a > b for a, b in zip(last, inner, strict=True)),
        "the variance of Δz is large beside the squared part of the change across the state, and most so in the last "
        f"layer: {' and '.join(map(short, last))} times it there, {' and '.join(map(short, inner))} in the median of "
        "inner layers (attention and MLP).",
    )


def of_equal_weights(parts: dict[str, pd.DataFrame]) -> str:
    """Figure 19: the variance of the vocabulary as a whole beside that of the likely tokens."""
    over = [middle(part).uniform_variance / (2 * middle(part).probability_estimate) for part in parts.values()]
    return stated(
        f"With every token alike the variance of Δz is {' and '.join(short(float(x.median())) for x in over)} times "
        "Var_r(Δz), in which the likely ones count, in the median of inner layers (attention and MLP)."
    )


def of_depth(attention: pd.DataFrame) -> str:
    """Figure 14: does KL(p‖q) grow with depth, where an attention is left out?"""
    rank = float(stats.spearmanr(attention.layer, attention.kl).statistic)
    return verdict(
        rank > 0.5,
        "deeper layers move the prediction more, an attention left out: the rank correlation of KL(p‖q) with depth is "
        f"{short(rank)}, and its largest mean is that of layer {int(attention.layer[attention.kl.idxmax()])}.",
    )


def of_the_pruned(found: dict[str, Any]) -> str:
    """Figure 13: the same order of spaces, and an MLP that is pruned stays closer than one that is gone."""
    less, more, closer = {}, {}, {}
    for what, (thinned, gone) in by_part(found).items():
        less[what] = int((thinned.logit < thinned.hidden).sum())
        more[what] = int((thinned.probability > thinned.hidden).sum())
        closer[what] = float((middle(gone).hidden / middle(thinned).hidden).median())
        count = len(thinned)
    says = [", ".join(f"{n} of {count} {NAMES[w]}s" for w, n in counts.items()) for counts in (less, more)]
    same = all(2 * n > count for counts in (less, more) for n in counts.values())
    return verdict(
        same and min(closer.values()) > 1,
        f"parts {PRUNED} show the same order: logits turn less than the state ({says[0]}), probabilities more "
        f"({says[1]}). The state turns {short(closer['mlp'])} times less than without the MLP, and "
        f"{short(closer['attention'])} times less than without the attention (medians of inner layers).",
    )


def of_exits(found: dict[str, Any]) -> str:
    """The paper's own place: behind the attention, before the MLP has run."""
    part = found[BEHIND]
    less, more = int((part.logit < part.hidden).sum()), int((part.probability > part.hidden).sum())
    return verdict(
        2 * min(less, more) > len(part),
        "read behind the attention, as the paper reads it, and not where the layer ends: logits turn less than the "
        f"state at {less} of {len(part)} layers, probabilities more at {more}.",
    )


def of_the_mean(found: dict[str, Any]) -> str:
    """How much of the logits' robustness is a number that no softmax sees."""
    table = found["attention left out, logits without their mean"]
    inner = middle(table)
    with_it, without = (float((inner.hidden / inner[z]).median()) for z in ("logit", "logit_without_mean"))
    said = (
        f"the logits' mean over the vocabulary, which no softmax sees, holds {span(100 * table.mean_share)} % of ‖z‖² "
        f"(attention). With it, h turns {short(with_it)} times as much as z in the median of layers "
        f"{inner.layer.min()} to {inner.layer.max()}; without it, {short(without)} times."
    )
    if with_it <= 1:  # no robustness that the mean could be a part of
        return stated(said)
    return verdict(without > with_it / 2, said, no="Put right")


def of_temperatures(found: dict[str, Any], at: int) -> str:
    rows = found["temperatures"].set_index("temperature")
    p, kl = (rows[f"{measure}_estimate"] / rows[measure] for measure in ("probability", "kl"))
    each = "; ".join(f"{short(p[T])} at T = {T:g} (KL {short(kl[T])})" for T in rows.index)
    return verdict(
        p.max() < 1.25 * p.min(),
        f"the estimate of 1 − cos(p, q) over what is measured, at the attention of layer {at}: {each}. `Δz/T` grows as "
        "T falls (the paper finds the estimate good at every temperature).",
    )


if __name__ == "__main__":
    typer.run(main)
