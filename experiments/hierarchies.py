"""What experiments of chapter 4 share: the prompts of the paper's Table 3, the models that it compares, intervals."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lyapunov_prune as lp
from experiments import statements
from experiments.common import job_folder
from lyapunov_prune.cli.inputs import folder_name
from lyapunov_prune.data.choices import ChoiceItem, tokenize
from lyapunov_prune.data.text import adds_bos
from lyapunov_prune.forward.anatomy import Kind, find_anatomy
from lyapunov_prune.forward.branches import zero_outputs
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import once

# Math2 in the longer words of Table 2.
PROMPTS = {
    "MC1": "Tom has 15 candies. He eats 4 and gives 3 to his friend. How many candies does Tom have left? "
    "Choose the correct answer: A) 6 B) 7 C) 8 D) 9",
    "MC2": "Which planet is known as the Red Planet? Choose the correct answer: A) Venus B) Mars C) Jupiter D) Saturn",
    "MC3": "Which of the following animals is a mammal? Choose the correct answer: A) Snake B) Frog C) Dog D) Lizard",
    "MC4": "Mark is older than John, and John is older than Alex. Who is the youngest? "
    "Choose the correct answer: A) Mark B) John C) Alex D) None of them",
    "Math1": "John has twice as many books as Mary. Together they have 18 books. How many books does John have?",
    "Math2": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?",
    "Math3": "Emma has three times as many apples as Liam. Together they have 24 apples. "
    "How many apples does Emma have?",
    "Math4": "Alice buys 5 packs of pencils, each containing 12 pencils. She gives 8 pencils to her brother and 15 to "
    "her friend. How many pencils does Alice have left?",
    "Gen1": "Tell a short, coherent story about a child who finds a mysterious key and discovers what it opens.",
    "Gen2": "Explain step by step how to solve a math word problem where a student calculates how many apples remain "
    "after giving some away.",
    "Gen3": "Write a short explanation suitable for a 10-year-old describing why the Earth has day and night.",
    "Gen4": "Describe, step by step, how to make a peanut butter and jelly sandwich.",
}
DRAWS = 2000
AWQ = "AWQ 4 bits, groups of 64"  # what the paper's Figure 12 quantises by
R = TypeVar("R", bound=Result)


def kept(
    model: str, name: str, kind: type[R], origin: MeasuredOn, parameters: Mapping[str, Any], work: Callable[[], R]
) -> R:
    """The result that an earlier run of `name` has left in `runs/experiments/`, asked the same, or else a new one."""
    path = job_folder(model) / f"{folder_name(name)}.json"
    return once(path, kind, origin, parameters, work)


def encoded(loaded: lp.models.Decoder) -> dict[str, torch.Tensor]:
    """The prompts as ids, 1 × tokens: as a user's message where the tokenizer has a template for that."""
    tokenizer = loaded.tokenizer
    if tokenizer.chat_template is None:
        return {name: tokenizer(text, return_tensors="pt")["input_ids"] for name, text in PROMPTS.items()}
    found = {}
    for name, text in PROMPTS.items():
        message = [{"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        found[name] = tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return found


def measured_on(loaded: lp.models.Decoder, prompts: dict[str, torch.Tensor]) -> MeasuredOn:
    """Prompts of different lengths as one measurement; the context is that of the longest."""
    ids = torch.cat(list(prompts.values()), dim=1)
    bos = None if loaded.tokenizer.chat_template else adds_bos(loaded.tokenizer)
    batch = lp.TokenBatch(ids, text=f"{len(prompts)} prompts of the paper", split="all", bos=bos)
    return replace(batch.measured_on(loaded.model), context=max(p.shape[1] for p in prompts.values()))


def without_branches(
    model: PreTrainedModel, attention: tuple[int, ...] = (), mlp: tuple[int, ...] = ()
) -> PreTrainedModel:
    """A copy of `model` in which these attentions and MLPs add nothing, because their output projections are zero."""
    made = copy.deepcopy(model)
    anatomy = find_anatomy(wrap(made), sorted({*attention, *mlp}))
    for layer, kind in [*((layer, "attention") for layer in attention), *((layer, "mlp") for layer in mlp)]:
        part = anatomy[layer].parts.get(kind)
        if part is None or any(zero_outputs(branch) is None for branch in part.branches):
            raise lp.LyapunovPruneError(f"layer {layer} has no {kind} that ends in a matrix of its own; take others")
    return made


def makers(loaded: lp.models.Decoder, calibration: lp.TokenBatch) -> dict[str, Callable[[], PreTrainedModel]]:
    """The models that are compared, made on `calibration` when they are asked for; layers go by Block Influence."""
    dense = loaded.model
    influence = {
        "layers": lp.block_influence,
        "attention": lp.profiles.sublayer_influence,
        "MLP": lp.profiles.sublayer_influence,
    }
    measure = cache(lambda measured_by: measured_by(dense, calibration))

    def drop(what: str, count: int) -> PreTrainedModel:
        found = measure(influence[what])
        if what == "layers":
            return lp.remove_layers(dense, lp.rank_layers(None, found, criterion="bi").plan(count))
        kind: Kind = "mlp" if what == "MLP" else "attention"
        return without_branches(dense, **{kind: lp.ranking.rank_sublayers(found, kind).order[:count]})

    def compress(**setting: Any) -> PreTrainedModel:
        return lp.compress(dense, calibration, **setting).model

    return {
        **{f"{what} − {count}": partial(drop, what, count) for what in influence for count in (4, 8)},
        "Wanda 50 %": partial(compress, method="wanda", sparsity=0.5),
        "SparseGPT 50 %": partial(compress, method="sparsegpt", sparsity=0.5),
        "4 bits, a row": partial(compress, method="rtn", bits=4),
        "4 bits, groups of 64": partial(compress, method="rtn", bits=4, group_size=64),
        AWQ: partial(compress, method="awq", bits=4, group_size=64),
        "GPTQ 4 bits, groups of 64": partial(compress, method="gptq", bits=4, group_size=64),
        "8 bits, a row": partial(compress, method="rtn", bits=8),
    }


def patterned(loaded: lp.models.Decoder, calibration: lp.TokenBatch) -> dict[str, Callable[[], PreTrainedModel]]:
    """The models of the paper's Figures 3 and 9, half of the weights gone, alone or so many of so many kept."""

    def compress(method: str, **setting: Any) -> PreTrainedModel:
        return lp.compress(loaded.model, calibration, method=method, **setting).model

    ways: dict[str, dict[str, Any]] = {"50 %": {"sparsity": 0.5}, "4:8": {"pattern": "4:8"}, "2:4": {"pattern": "2:4"}}
    return {
        f"{label} {way}": partial(compress, method, **setting)
        for label, method in (("Wanda", "wanda"), ("SparseGPT", "sparsegpt"))
        for way, setting in ways.items()
    }


@torch.no_grad()
def taken(model: PreTrainedModel, item: ChoiceItem, tokenizer: PreTrainedTokenizerBase) -> int:
    """The choice of largest log-likelihood per character, as `compare_choices` has it, of one model alone."""
    ids, lengths, shared = tokenize(item, tokenizer)
    ids = ids.to(model.device)
    log_p = lift(model(ids).logits[:, shared - 1 : -1]).log_softmax(-1)
    each = log_p.gather(-1, ids[:, shared:, None])[..., 0]
    sums = [float(row[: length - shared].sum()) for row, length in zip(each, lengths, strict=True)]
    return int(np.argmax(np.array(sums) / np.array([len(choice) for choice in item.choices])))


def share_kept(dense: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Of every prompt, the share of the dense text that stands before the texts part."""
    return np.cumprod(dense == own, axis=-1).mean(-1)


def interval(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis and its 95 % interval, 3 × …: percentile bootstrap; NaN entries are left out."""
    draws = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    seen = np.isfinite(values)
    filled = np.where(seen, values, 0.0)
    with np.errstate(invalid="ignore"):  # a draw in which all are missing
        means = filled[draws].sum(1) / seen[draws].sum(1)
        mean = filled.sum(0) / seen.sum(0)
    low, high = np.nanquantile(means, [0.025, 0.975], axis=0) if np.isfinite(means).any() else (mean, mean)
    return np.stack([mean, low, high])


def summarise(frame: pd.DataFrame, over: str, by: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """For each group of `by`: mean, low and high of `columns` over the values of `over`, each of which counts once."""
    rows = []
    for key, part in frame.groupby(list(by), sort=False):
        each = part.groupby(over, sort=False)[list(columns)].mean()
        found = interval(each.to_numpy(float))
        row: dict[str, Any] = dict(zip(by, key, strict=True))
        for column, three in zip(columns, found.T, strict=True):
            row |= dict(zip((column, f"{column}_low", f"{column}_high"), three, strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows, numbers to six digits; null where there is nothing to measure."""
    return [
        {str(k): None if v != v else float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
        for row in frame.to_dict("records")
    ]


def cell(row: Mapping[str, Any], name: str, of: Callable[[float], float] = float) -> str:
    """A measure of a row of `summarise` with its interval, each of the three numbers put through `of`."""
    value, *ends = (of(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return statements.interval(value, *sorted(ends))


def percent(x: float) -> float:
    return 100 * x


def opened(path: Path) -> dict[str, Any]:
    """What `as_json` wrote, rows as a DataFrame."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: pd.DataFrame(value) if isinstance(value, list) and isinstance(value[0], dict) else value
        for name, value in content.items()
    }


def as_json(content: dict[str, Any]) -> str:
    """One row of a table a line."""
    parts = []
    for name, value in content.items():
        if isinstance(value, list):
            lines = ",\n  ".join(json.dumps(encode(row), ensure_ascii=False) for row in value)
            text = f"[\n  {lines}\n ]"
        else:
            text = json.dumps(encode(value), ensure_ascii=False)
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
