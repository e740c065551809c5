"""What the gate says about every family: `python tests/families/verdicts.py [NAME ...]` writes table and page.

With names only their rows are made again. `--removals NAME ...` prints the control and the removals alone, in a
fraction of the time, and writes nothing. The table is `results.json` beside this file, the page is `docs/families.md`.
The test compares with the table.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds `families` and `helpers`
from families.control import verify_intact
from families.features import FEATURES, NONE, WRONG, YES, judge_features
from families.zoo import LAYERS, VOCABULARY, ZOO, make_zoo, model_type_of
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from experiments.sublayer_growth import sublayer_growth
from lyapunov_prune import (
    LyapunovPruneError,
    block_influence,
    check_bounds,
    measure_contraction,
    remove_layers,
    verify_removal,
)
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.logits import deviation, sample_inputs, uncached_logits
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.families import TRUSTED
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.roles import UNKNOWN
from lyapunov_prune.models.structure import find_structure, require_causal
from lyapunov_prune.pruning.surgery import refusal

TABLE = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
TRIED = {
    "calibration": "`compress --method wanda` on every matrix ([compression.md](compression.md))",
    "compact": "one attention leaves for a checkpoint in the compact format",
    "joint": "`joint`: attentions and activations are chosen together ([joint.md](joint.md))",
    "width": "`prune --what width`",
    "experts": '`prune --what experts`; "-" where there are none',
    "low-rank healing": "`heal --update-rank` of a model that lost a layer",
    "mending": "`prune --mend`",
    "streamed": "`--device disk`: logits and Block Influence with one layer in memory",
}
REMOVALS = {
    "one (3)": [3],
    "two apart (2, 5)": [2, 5],
    "run at the end (6, 7)": [6, 7],
    "layer 0": [0],
    "all but one (2)": [i for i in range(LAYERS) if i != 2],
}
EPSILON = 1e-2


class Row(TypedDict):
    """`control`, `measured`, `checked`, every removal and every feature are "yes" or the reason why not."""

    model_class: str
    control: str
    removals: dict[str, str]
    measured: str
    checked: str
    features: dict[str, str]


def judge(name: str, sets: Iterable[str] = tuple(REMOVALS), measured: bool = True, controlled: bool = True) -> Row:
    """Build the family, run its intact control, and put it through the removals of `sets` and the measurements."""
    row = Row(
        model_class=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type_of(name)],
        control=YES,
        removals={},
        measured="-",
        checked="-",
        features=dict.fromkeys(FEATURES, NONE),
    )
    try:
        model = make_zoo(name)
    except Exception as error:
        row["control"] = f"cannot be built: {_line(error)}"
        return row
    if controlled:
        row["control"] = _control(model)
    if row["control"] == YES:
        row["removals"] = {label: _removal(model, REMOVALS[label]) for label in sets}
        if measured:
            row["measured"], row["checked"] = _measured(model), _checked(model)
    return row


@torch.no_grad()
def _control(model: PreTrainedModel) -> str:
    try:
        structure = find_structure(model)
        require_causal(model)
        ids = sample_inputs(wrap(model), None)[0]
        whole = uncached_logits(model, ids)
        if not whole.isfinite().all():
            return "its logits are not finite"
        for index in range(structure.num_layers):
            with skipped(structure, (index,)):
                if deviation(uncached_logits(model, ids), whole) < 1e-3:
                    return f"layer {index} of the tiny model does not matter"
        report = verify_intact(model)
    except Exception as error:
        return _line(error)
    return YES if report.passed else report.failure()


def _removal(model: PreTrainedModel, layers: list[int]) -> str:
    """What is not refused has to pass the gate; a search is told the refusal before the layers go."""
    try:
        told = refusal(wrap(model), layers)
        pruned = remove_layers(model, layers)
    except LyapunovPruneError as error:
        return str(error) if told in (None, str(error)) else f"{WRONG}: {told}, and: {error}"
    except Exception as error:
        return f"{WRONG}: {_line(error)}"
    if told:
        return f"{WRONG}: it can be removed, and a search is told: {told}"
    if find_structure(model).model_type in TRUSTED:  # the others have been through the gate
        report = verify_removal(model, pruned, layers)
        if not report.passed:
            return f"{WRONG}: {report.failure()}"
    return YES


def _measured(model: PreTrainedModel) -> str:
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    try:
        profile = measure_contraction(model, ids, epsilon=EPSILON, seeds=(0,))
        influence = block_influence(model, ids).influence
        matrices = find_projections(wrap(model))
        growth = _growth(model, ids)
    except LyapunovPruneError as error:
        return str(error)
    except Exception as error:
        return f"{WRONG}: {_line(error)}"
    told_apart = ~np.isnan(growth)
    sound = {
        "growth by sublayer does not multiply to the layer's": np.allclose(
            growth[told_apart], profile.error_growth[told_apart], rtol=1e-4
        ),
        "the error before layer 0 is not ε": np.isclose(profile.relative_energy[0], EPSILON**2, rtol=1e-3),
        "a factor is not finite and positive": (np.isfinite(profile.rho) & (profile.rho > 0)).all(),
        "not every layer is measured": len(profile.rho) == len(influence) == LAYERS,
        "Block Influence is not in [0, 2]": ((influence >= 0) & (influence <= 2)).all(),
        "a layer without matrices": {matrix.layer for matrix in matrices} == set(range(LAYERS)),
    }
    return next((f"{WRONG}: {what}" for what, holds in sound.items() if not holds), YES)


def _growth(model: PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    """Growth of the error through the branches of each layer together, NaN where branches are not told apart."""
    try:
        parts = sublayer_growth(model, ids, epsilon=EPSILON, seeds=(0,)).error_growth
    except LyapunovPruneError:  # side by side, or of several parts
        return np.full(LAYERS, np.nan)
    return np.where(np.isnan(parts).all(1), np.nan, np.nanprod(parts, axis=1))


def _checked(model: PreTrainedModel) -> str:
    """Every matrix pruned by half, and its bound held on a few tokens; none may be left that is not listed."""
    ids = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))
    try:
        report = check_bounds(model, ids, sparsity=0.5)
    except LyapunovPruneError as error:
        return str(error)
    except Exception as error:
        return f"{WRONG}: {_line(error)}"
    sound = {"a bound is violated": report.passed} | {f"no bound of {x}": x.why != UNKNOWN for x in report.left_alone}
    return next((f"{WRONG}: {what}" for what, holds in sound.items() if not holds), YES)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, LyapunovPruneError) else f"{type(error).__name__}: {text}"[:200]


def load_table() -> dict[str, Row]:
    table: dict[str, Row] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def page(table: dict[str, Row]) -> str:
    """The table as Markdown, with the counts on top."""
    passed = {name: row for name, row in table.items() if row["control"] == YES}
    every = [name for name, row in passed.items() if set(row["removals"].values()) == {YES}]
    some = [name for name, row in passed.items() if name not in every and YES in row["removals"].values()]
    none = [name for name in passed if name not in every and name not in some]
    measured, checked = (sum(row[part] == YES for row in passed.values()) for part in ("measured", "checked"))
    verdicts = [verdict for row in passed.values() for verdict in row["removals"].values()]
    removed = verdicts.count(YES)
    wrong = sum(verdict.startswith(WRONG) for verdict in verdicts)
    tried = {label: [row["features"][label] for row in passed.values()] for label in FEATURES}
    lines = [
        "# Families",
        "",
        'What works for your model. Look up its `model_type` in the second table: "yes" means that the feature was',
        'tried and its check passed, "-" that the family has nothing of the kind; a number is the reason below for a',
        "refusal. [Removing layers](removing-layers.md) explains what is checked.",
        "",
        "`python tests/families/verdicts.py` wrote this page and `make test` checks it: a tiny random model of every",
        "model type that `AutoModelForCausalLM` of transformers 5.23 lists, eight layers each, with every kind of",
        "layer that the family mixes.",
        "",
        f"- {len(table)} rows: {len(set(map(model_type_of, table)))} model types, some in a second variant",
        f"- {len(passed)} pass the control, unchanged: causal, finite, every layer matters, cached decoding like",
        "  uncached, the same after saving and loading. The others fail in transformers itself, are no causal",
        "  decoders, or (BLT, HRM, XLM) have no chain of layers that this program finds; the column says which",
        f"- of these, {len(every)} ({len(every) / len(passed):.0%}) can lose every set of layers tried and pass the",
        f"  removal check, {len(some)} some sets (the others are refused with the reason), {len(none)} none",
        f"- {removed} of {len(verdicts)} removals are done and correct, {len(verdicts) - removed - wrong} refused, "
        f"{wrong} wrong",
        f"- in {measured} of the {len(passed)} ρ, Block Influence and the list of matrices are measured; in {checked}",
        "  the bound of every matrix is checked",
        "",
        "| feature | what is tried | yes | refused |",
        "| --- | --- | --- | --- |",
        *(
            f"| {label} | {TRIED[label]} | {found.count(YES)} | {len(found) - found.count(YES) - found.count(NONE)} |"
            for label, found in tried.items()
        ),
        "",
        f"| model type | class | intact control | {' | '.join([*REMOVALS, 'measured', 'checked', *FEATURES])} |",
        f"| {' | '.join(['---'] * (5 + len(REMOVALS) + len(FEATURES)))} |",
    ]
    notes: list[str] = []

    def cell(verdict: str) -> str:
        if verdict in (YES, "-"):
            return verdict
        if verdict not in notes:
            notes.append(verdict)
        return f"no [{notes.index(verdict) + 1}](#reasons)"

    for name, row in table.items():
        cells = [row["control"], *(row["removals"].get(label, "-") for label in REMOVALS)]
        cells += [row["measured"], row["checked"], *row["features"].values()]
        lines.append(f"| {name} | {row['model_class']} | {' | '.join(map(cell, cells))} |")
    lines += ["", "## Reasons", ""]
    lines += [
        f"{number}. {note.replace('<', '&lt;').replace('*', chr(92) + '*')}" for number, note in enumerate(notes, 1)
    ]
    return "\n".join(lines) + "\n"


def _start() -> None:
    torch.set_num_threads(1)


def _row(name: str) -> Row:
    row = judge(name)
    if row["control"] == YES:
        row["features"] = judge_features(lambda: make_zoo(name))
    return row


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--removals"] or list(ZOO)
    if "--removals" in sys.argv:
        for name in names:
            row = judge(name, measured=False)
            removals = (f"{what}: {told}" for what, told in row["removals"].items())
            print(f"{name}: {row['control']}", *removals, sep="\n  ")
        return
    with multiprocessing.get_context("spawn").Pool(2, initializer=_start) as pool:
        rows = dict(zip(names, pool.map(_row, names, chunksize=1), strict=True))
    kept = load_table() if TABLE.exists() else {}
    table = {name: rows.get(name) or kept[name] for name in ZOO}
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    made = page(table)
    PAGE.write_text(made, encoding="utf-8")
    print("\n".join(made.splitlines()[6:16]))


if __name__ == "__main__":
    main()
