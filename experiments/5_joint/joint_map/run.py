"""What do the 22 points give that the authors of boundary depth pruning publish for their map?

    python experiments/5_joint/joint_map/run.py

No model runs: the points are a table. Writes map.json, decision.json, beside.json and surface.svg beside this file.
What they say goes into README.md by `make tables`.
"""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import draw, run_command
from experiments.noisy_maps import noisy_choices
from experiments.statements import short, table
from lyapunov_prune.joint import JointDecision, JointMap, decide, fit_map
from lyapunov_prune.joint.map import design, left_two_out
from lyapunov_prune.report.joint import joint_figure
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
LAYERS, REMOVE = 12, 8  # a + t = 16/12 kept
REFITS, SEED = 500, 0
THEIR_ERROR, THEIR_KEPT = 0.487, (8, 8)
_AXIS = (1, 0.92, 0.83, 0.75, 0.67, 0.58, 0.50, 0.42, 0.33)
_ATTENTION = (81.80, 81.31, 80.90, 80.20, 78.10, 77.40, 72.69, 69.44, 64.84)
_ACTIVATION = (81.07, 80.40, 78.90, 77.80, 76.70, 75.20, 74.50, 73.90)
_BOTH = ((0.92, 0.92, 80.34), (0.92, 0.83, 80.03), (0.83, 0.83, 78.88), (0.83, 0.75, 78.08), (0.75, 0.75, 76.52))
# Share of attentions kept, share of activations kept, top-1 accuracy after fast finetuning.
PUBLISHED = (
    *((a, 1, score) for a, score in zip(_AXIS, _ATTENTION, strict=True)),
    *((1, t, score) for t, score in zip(_AXIS[1:], _ACTIVATION, strict=True)),
    *_BOTH,
)


def main() -> None:
    points = np.array(PUBLISHED)
    fitted = fit_map((1 - points[:, :2]).tolist(), points[:, 2].tolist())
    # One score a point and none of how the items were judged: no seeds, and a selection set taken for exact.
    decision = decide(fitted, LAYERS, remove=REMOVE, selection_error=0.0)
    fitted.save(HERE / "map.json")
    decision.save(HERE / "decision.json")
    beside = {
        "refits": noisy_choices(fitted, decision, fitted.error, REFITS, SEED).tolist(),
        "readings": {
            "shares as printed, two decimals": readings(fitted.removed, fitted.scores),
            "shares as twelfths": readings(np.round(fitted.removed * LAYERS) / LAYERS, fitted.scores),
        },
    }
    write_whole(HERE / "beside.json", json.dumps(beside, indent=1, allow_nan=False) + "\n")
    draw(HERE, {"surface": joint_figure(fitted, decision)})


def readings(removed: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    """What "error" may mean, of degree 2, and the pair kept that the degree puts first on the budget line."""
    found = {"leave-two-out RMSE": float(left_two_out(removed, scores, 2))}
    X, n = design(removed, 2), len(scores)
    for leave, name in ((2, "two"), (1, "one")):
        errors = []
        for out in combinations(range(n), leave):
            rest = np.setdiff1d(np.arange(n), out)
            theta = np.linalg.lstsq(X[rest], scores[rest], rcond=None)[0]
            errors.append(scores[list(out)] - X[list(out)] @ theta)
        if leave == 1:
            found["leave-one-out RMSE"] = float(np.sqrt(np.square(errors).mean()))
        else:
            found["mean over pairs of the pair's RMSE"] = float(np.sqrt(np.square(errors).mean(1)).mean())
        found[f"leave-{name}-out mean absolute error"] = float(np.abs(errors).mean())
    theta = np.linalg.lstsq(X, scores, rcond=None)[0]
    squares = float(np.square(scores - X @ theta).sum())
    found["residual, n − p"] = float(np.sqrt(squares / (n - X.shape[1])))
    found["residual, n"] = float(np.sqrt(squares / n))
    line = np.array([(k, REMOVE - k) for k in range(REMOVE + 1)])
    best = line[(design(line / LAYERS, 2) @ theta).argmax()]
    return {"errors": found, "kept": (LAYERS - best).tolist()}


def written() -> dict[str, str]:
    fitted, decision = JointMap.load(HERE / "map.json"), JointDecision.load(HERE / "decision.json")
    beside = json.loads((HERE / "beside.json").read_text(encoding="utf-8"))
    return {
        "degrees": degrees(fitted),
        "pairs": pairs(decision, beside["refits"]),
        "readings": read(beside["readings"]),
        **numbers(fitted, decision),
    }


def degrees(fitted: JointMap) -> str:
    rows: list[tuple[int, float | None, str]] = [
        (degree, error, "chosen" if degree == fitted.degree else "") for degree, error in fitted.errors.items()
    ]
    rows += [(degree, None, f"excluded: {reason}") for degree, reason in fitted.excluded.items()]
    return table(("κ", "leave-two-out RMSE", ""), sorted(rows))


def pairs(decision: JointDecision, refits: list[float]) -> str:
    columns = (decision.pairs, decision.predicted, decision.low, decision.high, decision.within, refits)
    rows = [
        (kept(pair), f"{P:.2f}", f"{low:.1f} to {high:.1f}", "yes" if within else "no", f"{100 * share:.0f} %")
        for pair, P, low, high, within, share in zip(*columns, strict=True)
    ]
    head = ("kept (attentions, activations)", "P", "95 % interval", "within twice the noise", f"of {REFITS} refits")
    return table(head, rows)


def read(found: dict[str, Any]) -> str:
    names = next(iter(found.values()))["errors"]
    rows = [(name, *(f"{reading['errors'][name]:.3f}" for reading in found.values())) for name in names]
    rows.append(("pair kept", *(f"({a}/{LAYERS}, {t}/{LAYERS})" for a, t in (r["kept"] for r in found.values()))))
    return table(("of κ = 2", *found), rows)


def numbers(fitted: JointMap, decision: JointDecision) -> dict[str, str]:
    """`behind`: by how many points the published pair lies behind the best one here."""
    theirs = next(i for i, pair in enumerate(decision.pairs) if tuple(LAYERS - pair) == THEIR_KEPT)
    return {
        "rmse": f"{fitted.error:.3f}",
        "published": str(THEIR_ERROR),
        "pair": kept(decision.pairs[decision.best]),
        "behind": short(float(decision.predicted[decision.best] - decision.predicted[theirs])),
        "gap": short(decision.gap),
        "noise": short(decision.noise),
        "regret": short(decision.regret),
        "deviation": short(fitted.residual[0]),
    }


def kept(pair: np.ndarray) -> str:
    """Removed counts as the shares kept that the authors write."""
    attention, activation = (LAYERS - np.asarray(pair)).tolist()
    return f"({attention}/{LAYERS}, {activation}/{LAYERS})"


if __name__ == "__main__":
    run_command(main, HERE / "map.json", written)
