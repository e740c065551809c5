"""What a measured divergence means for perplexity and greedy text: two lines fitted over removed sets of layers.

    python experiments/4_hierarchy/prediction/expected.py

Reads every prediction.json and measured.json here. Of each model half of the sets, drawn by SEED, are held out; the
other half gives the lines and their widths.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
SEED, SHARE, STEPS = 0, 0.9, 32
MEASURES = {"perplexity": "log_ratio", "first_difference": "later"}


@dataclass(frozen=True)
class Line:
    """`ln y = intercept + slope ln KL`, with an interval of half width `width` that holds a `share` of the fitted sets.

    The width is the `⌈(n + 1) share⌉`-th smallest of the n leave-one-out residuals `|residual|` (the jackknife of
    Barber et al., Annals of Statistics 49, 2021, arXiv:1905.02928, §1.2, which guarantees no coverage). `covered` is
    the share of held-out sets inside the interval.
    """

    intercept: float
    slope: float
    width: float
    covered: float


def found() -> dict[str, Any]:
    """The lines, how many sets gave them, and the shares of others that they hold."""
    sets = measured()
    models = list(dict.fromkeys(sets.model))
    out = drawn_out(sets)
    fitting, held_out = sets[~out], sets[out]
    lines = {name: fitted(fitting, held_out, of) for name, of in MEASURES.items()}
    other = {}
    for model in models if len(models) > 1 else ():  # a model that the table has not seen
        seen, unseen = fitting[fitting.model != model], sets[sets.model == model]
        other[model] = {name: fitted(seen, unseen, of).covered for name, of in MEASURES.items()}
    return {
        "models": models,
        "fitted": len(fitting),
        "held_out": len(held_out),
        "seed": SEED,
        "share": SHARE,
        "least": round(float(fitting.kl.min()), 4),
        "most": round(float(fitting.kl.max()), 4),
        "steps": STEPS,
        **{name: {k: round(v, 4) for k, v in vars(line).items()} for name, line in lines.items()},
        "unseen_model": {m: {k: round(v, 4) for k, v in each.items()} for m, each in other.items()},
    }


def measured(here: Path = HERE) -> pd.DataFrame:
    """A row a set: its measured divergence, and what became of it."""
    rows = []
    for path in sorted(here.glob("**/measured.json")):
        known = json.loads(path.with_name("prediction.json").read_text(encoding="utf-8"))
        outcome = {tuple(each["removed"]): each for each in known["sets"]}
        for each in json.loads(path.read_text(encoding="utf-8"))["sets"]:
            found = outcome[tuple(each["removed"])]
            if found["log_ratio"] > 0:  # no set here makes the text likelier; its logarithm is fitted
                row = {"kl": each["kl"], "log_ratio": found["log_ratio"], "later": 1 + found["first_difference"]}
                rows.append({"model": known["measured_on"]["model"]["name"], **row})
    return pd.DataFrame(rows)


def drawn_out(sets: pd.DataFrame) -> pd.Series:
    """Of each model half of the sets, drawn at random: those that the lines do not see."""
    drawn = np.random.default_rng(SEED)
    out = pd.Series(True, index=sets.index)
    for _, own in sets.groupby("model"):
        out[drawn.permutation(own.index)[: len(own) // 2]] = False
    return out


def fitted(fitting: pd.DataFrame, held_out: pd.DataFrame, of: str) -> Line:
    """Least squares, the width from residuals that are left out one by one, and the share of `held_out` inside."""
    x, y = (np.log(fitting[name].to_numpy()) for name in ("kl", of))
    left = []
    for i in range(len(x)):
        line = np.polyfit(np.delete(x, i), np.delete(y, i), 1)
        left.append(abs(y[i] - np.polyval(line, x[i])))
    width = float(np.sort(left)[min(len(x), math.ceil((len(x) + 1) * SHARE)) - 1])
    line = np.polyfit(x, y, 1)
    off = np.abs(np.log(held_out[of]) - np.polyval(line, np.log(held_out.kl)))
    return Line(intercept=float(line[1]), slope=float(line[0]), width=width, covered=float((off <= width).mean()))


if __name__ == "__main__":
    print(json.dumps(found(), indent=1))
