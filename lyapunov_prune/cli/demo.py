"""The whole job on the built-in model: measure, rank, remove, verify, mend, heal, evaluate, report."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.data.text import load_text
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
from lyapunov_prune.evaluation.speed import Speed, measure_speed
from lyapunov_prune.healing.heal import heal
from lyapunov_prune.models.cache import BUILTIN
from lyapunov_prune.models.loading import load
from lyapunov_prune.profiles.profile import kept_profile
from lyapunov_prune.pruning.checkpoint import write_pruned
from lyapunov_prune.pruning.curve import RemovalCurve, evaluate_removals, removal_row
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.pruning.removal import mend, remove_layers
from lyapunov_prune.ranking.measured import rank_layers
from lyapunov_prune.ranking.table import DEFAULT
from lyapunov_prune.report.page import require_readable, write_report
from lyapunov_prune.results.files import folder_digest, require_writable, whole_folder, write_whole
from lyapunov_prune.results.once import once
from lyapunov_prune.results.result import Result

REMOVALS = (1, 2, 4, 8)
COMPARED = ("rho", "bi", "blend")
RACE = {"prompt": 256, "steps": 16, "repeats": 5}
# The checkpoint that is written: four of thirty layers.
WRITTEN = (DEFAULT, 4)
STEPS = 24  # of healing, from the mended model on
_RECORD = "pruned.fingerprint"
_RESULTS = ("profile.json", "removal.json", "recovery.json", "speed.json", f"pruned/{PROVENANCE}")
_WRITTEN = (*_RESULTS, *(f"plan-{criterion}.json" for criterion in COMPARED))


def run_demo(
    run: Path,
    *,
    tokens: int = 4096,
    context: int = 512,
    resume: bool = False,
    show: Callable[[str, Result], None],
) -> Path:
    """Run every step into the folder `run` and return the path of its report; what is measured goes to `show`, by name.

    With `resume`, steps whose results are already there, of the same model, texts and plans, are read instead of
    repeated. Raises LyapunovPruneError, before anything is measured, where nothing can be written or another file of
    the run cannot be drawn, and when `pruned` in it is not as an earlier demo left it: nobody else's folder is
    replaced.
    """
    require_writable(run)
    _require_own(run)
    require_readable(run, _WRITTEN)
    loaded = load(BUILTIN)
    model, tokenizer = loaded.model, loaded.tokenizer
    calibration = load_text("builtin", tokenizer, tokens=tokens, context=context)
    evaluation = load_text("builtin", tokenizer, tokens=tokens, context=context, split="evaluation")
    require_disjoint(calibration, evaluation)

    @cache
    def dense() -> Perplexity:
        return perplexity(model, evaluation, description="perplexity, dense")

    profile = kept_profile(run / "profile.json", model, calibration, resume=resume)
    show("profile", profile)

    rankings = {c: rank_layers(profile.contraction, profile.influence, criterion=c) for c in COMPARED}
    plans = {c: [ranking.plan(k) for k in REMOVALS] for c, ranking in rankings.items()}
    for criterion, ranking in rankings.items():
        ranking.plan(WRITTEN[1]).save(run / f"plan-{criterion}.json")
    removed = {"removed": {c: [plan.remove for plan in chosen] for c, chosen in plans.items()}}
    curve = once(
        run / "removal.json",
        RemovalCurve,
        evaluation.measured_on(model),
        removed,
        lambda: evaluate_removals(model, plans, evaluation, dense=dense()),
        resume=resume,
    )
    show("removal", curve)

    criterion, count = WRITTEN
    plan, target = rankings[criterion].plan(count), run / "pruned"
    made = target / PROVENANCE
    if not (resume and made.is_file() and Provenance.load(made).plan.to_json() == plan.to_json()):
        _require_own(run)  # still
        if target.exists():
            with TemporaryDirectory(dir=run, prefix=".pruned.old-") as old:  # half of it would be nobody's
                target.rename(Path(old) / "pruned")
        with whole_folder(target) as partial:
            write_pruned(model, tokenizer, plan, partial, calibration)
            write_whole(run / _RECORD, folder_digest(partial) + "\n")
    show("gate", Provenance.load(made).gate)

    def recovered() -> RemovalCurve:
        mended = mend(model, plan, calibration)
        healed = heal(mended, model, calibration, steps=STEPS).model
        cut = next(row for row in curve.rows if (row.criterion, row.removed) == (criterion, plan.remove))
        rows = [curve.dense, replace(cut, criterion="cut")]
        for name, state in {"mended": mended, f"mended, healed {STEPS} steps": healed}.items():
            after = perplexity(state, evaluation, description=f"perplexity, {name}")
            rows.append(removal_row(name, plan.remove, after, dense(), state))
        return RemovalCurve(tuple(rows), curve.measured_on)

    asked = {"removed": plan.remove, "steps": STEPS}
    on = evaluation.measured_on(model)
    show("recovery", once(run / "recovery.json", RemovalCurve, on, asked, recovered, resume=resume))

    def speed() -> Speed:
        models = {"dense": model}
        for plan in plans[criterion]:
            models[f"{len(plan.remove)} removed"] = remove_layers(model, plan)
        return measure_speed(models, **RACE)

    origin = calibration.measured_on(model)
    show("speed", once(run / "speed.json", Speed, origin, {**removed, **RACE}, speed, resume=resume))
    return write_report(run)


def _require_own(run: Path) -> None:
    """The record beside `pruned` is written before the folder has its name: no kill leaves one without the other."""
    target, record = run / "pruned", run / _RECORD
    if not os.path.lexists(target):
        return
    told = record.read_text(encoding="utf-8").strip() if record.is_file() else None
    if target.is_symlink() or not target.is_dir() or (any(target.iterdir()) and folder_digest(target) != told):
        raise LyapunovPruneError(f"{target} is not what a demo left there; move it away or give another --output")
