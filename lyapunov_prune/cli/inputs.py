"""What commands make of their options: model and text, a profile, refusals before minutes of measuring."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lyapunov_prune.cli.jobs import JOBS, first_goes_on, jobs_folder
from lyapunov_prune.cli.options import Inputs
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import show
from lyapunov_prune.errors import CheckFailed

if TYPE_CHECKING:  # a usage error must not wait for torch
    from lyapunov_prune.allocation.allocation import Allocation
    from lyapunov_prune.data.batch import Split, TokenBatch
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.results.result import Result

_AT_ONCE = 4096  # tokens of a forward on a GPU


def load_inputs(
    model: str,
    inputs: Inputs,
    split: Split = "calibration",
    *,
    plan: PruningPlan | None = None,
) -> tuple[Decoder, TokenBatch]:
    """The model and its text; a `plan` has to be for that model, of which the text says nothing."""
    from lyapunov_prune.data.batch import require_context

    loaded = inputs.load(model)
    if plan is not None:
        plan.require_model(loaded.identity)
    require_context(loaded.structure, inputs.context)
    return loaded, inputs.batch(loaded, split)


def windows_at_once(loaded: Decoder, context: int) -> int:
    """How many windows go through the model together: one on a CPU, and on a GPU as many as fill it.

    A streamed model takes all of them by itself.
    """
    if loaded.stream is not None or loaded.model.device.type == "cpu":
        return 1
    return max(1, _AT_ONCE // context)


def format_for(output: Path, format: str, given: Given) -> str:
    """The format to write: an output that ends in .gguf means gguf, and refuses any other."""
    if output.suffix != ".gguf" or format == "gguf":
        return format
    given.refuse(f"does not fit {output}, which is a GGUF file; leave it out", "format")
    return "gguf"


def load_judge(judge: str | None, loaded: Decoder, batch: TokenBatch, inputs: Inputs) -> TokenBatch:
    """The text that judges beside `batch`: if none is named what the model writes, or the built-in one beside that.

    A text that is named gives windows as long as those of `batch`, and one for every two of them.
    """
    from lyapunov_prune.data.batch import require_disjoint
    from lyapunov_prune.data.sources import SELF
    from lyapunov_prune.forward.reading import read
    from lyapunov_prune.mending.judge import second_text

    if judge is None and inputs.text == SELF:
        judge = "builtin"
    if judge is None or judge == SELF:
        return second_text(read(loaded, batch), jobs_folder())
    other = load_beside(judge, loaded, max(1, len(batch) // 2), inputs)
    require_disjoint(batch, other)
    return other


def load_beside(name: str, loaded: Decoder, windows: int, inputs: Inputs) -> TokenBatch:
    """So many windows of another text, as long as those of `text`."""
    other = replace(inputs, text=name, tokens=windows * inputs.context)
    return other.batch(loaded, "calibration")


def require_bounds(hold: bool, violated: int, where: Path) -> None:
    """Raise CheckFailed unless all bounds hold; `where` says which are violated."""
    if not hold:
        raise CheckFailed(f"{violated} bounds are violated; see {where}")


def require_ratio(result: Result, most: float | None) -> None:
    """Raise CheckFailed if the perplexity of `result` may be above `most` times the dense model's, or is not known."""
    ratio = result.against_dense()
    if most is not None and not (ratio is not None and ratio.high <= most):
        told = "no perplexity was compared with the dense model's" if ratio is None else ratio.told()
        raise CheckFailed(f"{told}: that is not within --fail-above {most:g}")


def require_studies(study: str) -> tuple[str, ...]:
    """The names in a list such as `group,layer`; `all` stands for every one that is not too dear."""
    from lyapunov_prune.sensitivity.table import STUDIES

    every = tuple(name for name, known in STUDIES.items() if known.in_all)
    named = map(str.strip, study.split(","))
    names = dict.fromkeys(each for name in named for each in (every if name == "all" else (name,)))
    for name in names:
        STUDIES[name]  # refuses one that there is not
    return tuple(names)


def chosen_allocation(allocation: str) -> str | Allocation:
    """A schedule's name, or the Allocation in a file of that name."""
    if not Path(allocation).is_file():
        return allocation

    from lyapunov_prune.allocation.allocation import Allocation

    return Allocation.load(allocation)


def run_folder(output: Path | None, model: str) -> Path:
    return output or Path("runs") / folder_name(model)


def begun_run(output: Path | None, model: str, *replaced: str) -> Path:
    """`run_folder`, refused before anything is measured: where nothing can be written, or its report cannot be drawn.

    `replaced`: the files that the command writes, whatever they hold now.
    """
    from lyapunov_prune.results.files import require_writable

    run = run_folder(output, model)
    require_writable(run)
    if run.is_dir():  # in a new one nothing can be broken, and what draws takes a second and 30 MB to load
        from lyapunov_prune.report.page import require_readable

        require_readable(run, replaced)
    return run


def folder_name(name: str) -> str:
    """`name` where that can name a folder, else what can with a hash of `name` behind: no two share a folder."""
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    if plain == name != JOBS.name and not re.search(r"(^|-)[0-9a-f]{8}$", name):
        return name
    return f"{plain[-100:]}-{hashlib.sha256(name.encode(errors='backslashreplace')).hexdigest()[:8]}".lstrip("-.")


def conclude(run: Path, file: str, result: Result) -> Path:
    """Save `result` as `file` in `run`, draw the report of the run, and show the result; returns the path."""
    written = result.save(run / file)
    draw_report(run)
    show(result, written)
    return written


def draw_report(run: Path) -> None:
    """Figures and page of the results in `run`, by the first process, without loading torch for a usage error."""
    first_goes_on()
    from lyapunov_prune.report.page import write_report

    write_report(run)
