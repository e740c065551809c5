"""Why errors contract: growth of the error against growth of the state, and Jacobians (§6.2, Figure 5).

    python experiments/1_contraction/residual_growth/run.py [--model MODEL] [--text FILE]

Writes contraction-EPSILON.json, jacobian.json and the figures beside this file.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import lyapunov_prune as lp
from experiments.common import Model, draw, inputs, run_command
from experiments.jacobians import JacobianNorms, jacobian_figure, sublayer_jacobians
from experiments.published import MODELS
from experiments.statements import short, span, table
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.report.drawing import COLOURS, GREY, depth_axis, log_axis, panels, svg

HERE = Path(__file__).parent
WITH_WORST = HERE.parent / "progressive_removal" / "contraction-builtin.json"  # of SmolLM2, which has the worst case
EPSILONS = (1e-3, 1e-2, 1e-1)
WINDOWS, TOKENS = 2, 64  # for the Jacobians, which cost far more a token


def main(model: Model = Model(), text: str = "builtin", tokens: int = 2048, context: int = 512) -> None:
    folder = model.folder(HERE)
    given = inputs(model, text, tokens, context)
    profiles = [
        lp.measure_contraction(given.loaded.model, given.calibration, epsilon=epsilon, seeds=range(2))
        for epsilon in EPSILONS
    ]
    for profile in profiles:
        profile.save(folder / f"contraction-{profile.epsilon:g}.json")
    few = replace(given.calibration, ids=given.calibration.ids[:WINDOWS, :TOKENS])
    jacobian = sublayer_jacobians(given.loaded.model, few)
    jacobian.save(folder / "jacobian.json")
    draw(folder, {"growth": growth_figure(profiles), "jacobian": jacobian_figure(jacobian)})


def growth_figure(profiles: Sequence[lp.profiles.ContractionProfile]) -> str:
    """Above: growth of error and state of the first profile, whose quotient is ρ. Below: ρ at every ε."""
    figure, (growth, factor) = panels(9, 5.4, 2)
    first = profiles[0]
    layers = np.arange(len(first.rho))
    for values, label, colour, marker in (
        (first.error_growth, "error, Σ‖e‖² after / before", COLOURS["bi"], "s"),
        (first.state_growth, "state, Σ‖h‖² after / before", COLOURS["blend"], "o"),
    ):
        growth.plot(layers, values, f"-{marker}", markersize=4, linewidth=0.8, color=colour, label=label)
    growth.set_ylabel("growth")
    for profile, colour, marker in zip(profiles, COLOURS.values(), "os^Dv", strict=False):
        factor.plot(layers, profile.rho, marker, markersize=4, color=colour, label=f"ε = {profile.epsilon:g}")
    factor.set_ylabel("contraction factor ρ")
    for axes in (growth, factor):
        axes.axhline(1, color=GREY, linewidth=0.8)
        log_axis(axes)
        axes.legend(frameon=False, fontsize=8)
    depth_axis(factor, len(layers))
    return svg(figure)


def written(folder: Path = HERE) -> dict[str, str]:
    """Growth of error and state and ρ: of the first layers, and where ρ is farthest from one."""
    profile = ContractionProfile.load(folder / "contraction-0.01.json")
    far = np.argsort(-np.abs(np.log(profile.rho)))
    shown = sorted({0, 1, 2, *map(int, far[:6])})
    rows = [
        [name, *(float(values[k]) for k in shown)]
        for name, values in (
            ("growth of the error, Σ‖e‖²", profile.error_growth),
            ("growth of the state, Σ‖h‖²", profile.state_growth),
            ("ρ", profile.rho),
        )
    ]
    jacobian = JacobianNorms.load(folder / "jacobian.json")
    others = np.array([ContractionProfile.load(folder / f"contraction-{e:g}.json").rho for e in EPSILONS])
    moved = float((others.max(0) / others.min(0)).max() - 1)
    gains = np.array([*jacobian.attention_gain, *jacobian.mlp_gain])
    return {
        "contracting": _of(profile.rho[:-1] < 1),
        "shrinking": _of(gains < 1),
        "setting": f"ρ: {profile.measured_on.line()}, {len(profile.seeds)} seeds.\n"
        f"Jacobians: {jacobian.measured_on.line()}.\n",
        "growth": table(["layer", *map(str, shown)], rows),
        "K": short(profile.norm_growth.mean()),
        "appendix-b": appendix_b(),
        "K over windows": span(profile.norm_growth),
        "most moved by epsilon": f"{short(100 * moved)} %",
        "operator norms": span([*jacobian.attention_norm, *jacobian.mlp_norm]),
    }


def appendix_b() -> str:
    """Norm growth K of every model over windows, ours and in italics what the paper prints.

    The worst case lets every layer grow as in the window where it grows most; files of older versions lack it.
    """
    rows: list[list[object]] = []
    for path in (WITH_WORST, *sorted(HERE.glob("*/contraction-0.01.json"))):
        found = ContractionProfile.load(path)
        on, K = found.measured_on, found.norm_growth
        name = f"**{on.model.name}**, {len(K)} windows of {on.context} tokens"
        rows.append([name, on.model.num_layers, float(K.mean()), float(K.max()), found.worst_growth])
    for model in MODELS:
        if model.growth:
            rows.append([model.name, model.layers, *(f"*{value:g}*" for value in model.growth)])
    return table(["model", "layers", "mean", "largest", "worst case"], rows)


def _of(holds: np.ndarray) -> str:
    """`9 of 29`; `none of 36`."""
    return f"{holds.sum() or 'none'} of {len(holds)}"


if __name__ == "__main__":
    run_command(main, HERE / "jacobian.json", written)
