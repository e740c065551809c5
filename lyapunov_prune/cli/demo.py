"""`shrink` on the built-in model, with a look at the profile of its layers first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lyapunov_prune.cli.jobs import jobs_folder
from lyapunov_prune.data.text import load_text
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.healing.report import REPORT as HEALING
from lyapunov_prune.models.cache import BUILTIN
from lyapunov_prune.models.loading import load
from lyapunov_prune.profiles.profile import kept_profile
from lyapunov_prune.pruning.provenance import PROVENANCE
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.report.page import require_readable, write_report
from lyapunov_prune.results.files import folder_digest, require_writable, write_whole
from lyapunov_prune.results.result import Result
from lyapunov_prune.results.store import once
from lyapunov_prune.shrinking.report import REPORT, Shrinking
from lyapunov_prune.shrinking.request import Request
from lyapunov_prune.shrinking.shrink import carry_out
from lyapunov_prune.shrinking.target import Target
from lyapunov_prune.shrinking.texts import Texts

SMALL = "small"  # the folder of the checkpoint, in that of the run
REMOVE = 0.25
PROFILED = 1024  # tokens
# Under five minutes on two cores: choosing and healing take most of it, and this is about half of what `shrink` spends.
SEARCH, STEPS = 24.0, 60  # forwards that choose layers, and steps of healing
_RECORD = f"{SMALL}.fingerprint"
_RESULTS = ("profile.json", "best.json", "eval.json", REPORT)
_WRITTEN = (*_RESULTS, f"{SMALL}/{PROVENANCE}", f"{SMALL}/{HEALING}", f"{SMALL}/{REPORT}")


def run_demo(
    run: Path,
    *,
    tokens: int = 12800,
    context: int = 128,
    show: Callable[[str, Result], None],
    told: Callable[[Any], Any] = lambda _: None,
) -> Path:
    """Profile the built-in model, shrink it into `run/small`, and return the path of the report of both.

    Both learn from the built-in text, of which the other half evaluates. What is measured goes to `show`, by name, and
    the estimate of the cost to `told`. What is there already, of the same model and text, is read instead of
    repeated. Raises LyapunovPruneError, before anything is measured, where nothing can be written or another file
    of the run cannot be drawn, and when `small` in it is not as an earlier demo left it: nobody else's folder is
    replaced.
    """
    require_writable(run)
    _require_own(run)
    require_readable(run, _WRITTEN)
    loaded = load(BUILTIN)
    text = load_text("builtin", loaded.tokenizer, tokens=tokens, context=context)
    looked_at = text.take(range(min(len(text), PROFILED // context)))
    show("profile", kept_profile(run / "profile.json", loaded.model, looked_at))

    def shrunk() -> Shrinking:
        _clear_own(run)
        request = Request(
            loaded.model,
            loaded.tokenizer,
            Target.of(remove=REMOVE),
            Texts(text, None, None, tokens, context),
            search=SEARCH,
            steps=STEPS,
            folder=jobs_folder(),
            text=("--text", "builtin"),
        )
        report = carry_out(request, run / SMALL, told).report
        write_whole(run / _RECORD, folder_digest(run / SMALL) + "\n")
        BestRemoval.load(run / SMALL / "best.json").save(run / "best.json")
        report.evaluation.save(run / "eval.json")
        return report

    if not (run / SMALL).exists():  # a report without its checkpoint answers nothing
        (run / REPORT).unlink(missing_ok=True)
    asked = {"remove": REMOVE}
    show("shrink", once(run / REPORT, Shrinking, text.measured_on(loaded.model), asked, shrunk))
    return write_report(run)


def _clear_own(run: Path) -> None:
    """Delete the checkpoint that an earlier demo left."""
    _require_own(run)  # still
    target = run / SMALL
    if target.exists():
        with TemporaryDirectory(dir=run, prefix=f".{SMALL}.old-") as old:  # half of it would be nobody's
            target.rename(Path(old) / SMALL)


def _require_own(run: Path) -> None:
    """Raise LyapunovPruneError for a checkpoint that is not, file by file, what a demo wrote a record of."""
    target, record = run / SMALL, run / _RECORD
    if not os.path.lexists(target):
        return
    told = record.read_text(encoding="utf-8").strip() if record.is_file() else None
    if target.is_symlink() or not target.is_dir() or (any(target.iterdir()) and folder_digest(target) != told):
        raise LyapunovPruneError(f"{target} is not what a demo left there; move it away")
