"""The command line: parse, call, save. Results go to files and stdout, progress to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lyapunov_prune import __version__
from lyapunov_prune.cli import checks
from lyapunov_prune.cli.commands.cache import cache
from lyapunov_prune.cli.commands.check import check
from lyapunov_prune.cli.commands.compress import compress
from lyapunov_prune.cli.commands.evaluate import evaluate
from lyapunov_prune.cli.commands.explain import explain
from lyapunov_prune.cli.commands.export import export
from lyapunov_prune.cli.commands.heal import heal
from lyapunov_prune.cli.commands.joint import joint
from lyapunov_prune.cli.commands.measure import profile, rank, sensitivity
from lyapunov_prune.cli.commands.predictions import hierarchy
from lyapunov_prune.cli.commands.prune import prune
from lyapunov_prune.cli.commands.shrink import shrink
from lyapunov_prune.cli.failures import READER_GONE, as_refusal, put_aside, require_sound_process, tell
from lyapunov_prune.cli.options import output_option, what_option
from lyapunov_prune.cli.records import flattened
from lyapunov_prune.cli.terminal import note, say, show, speak_any_language
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.progress import is_main

if TYPE_CHECKING:
    from lyapunov_prune.results.result import Result

app = typer.Typer(name="lyapunov-prune")


def _print_version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit


@app.callback()
def _common(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How compression errors travel through a transformer, and which layers it can do without."""


def demo() -> None:
    """Shrink the built-in model by a quarter, after a profile of its layers: minutes on two cores, in runs/demo."""
    from lyapunov_prune.cli.demo import run_demo

    output = Path("runs/demo")

    def show_part(name: str, result: Result) -> None:
        show(result, None, kept=output / f"{name}.json")
        say("")

    page = run_demo(output, show=show_part, told=lambda cost: note("\n".join(cost.answer())))
    say(f"Report: {page}")


def theorems(
    verify: Annotated[bool, what_option("--verify", help="Run lake build and lake test first.")] = False,
) -> None:
    """List the theorems: what they say, where they are used, whether lake verified them here."""
    from lyapunov_prune.bounds import theorems as registry

    if verify:
        registry.verify()
    state = registry.verification()
    say(state.message)
    for t in registry.theorems():
        users = ", ".join(t.used_by) or ("nothing" if t.unused else "nothing yet")
        say(f"{t.number or '':>3} {t.name}: {t.statement} Used by: {users}{': ' if t.unused else ''}{t.unused}.")


def report(
    run: Annotated[
        Path, checks.THERE, typer.Argument(help="Folder with the results of a run, or one of its .json files.")
    ],
    output: Annotated[
        Path | None,
        checks.RUN,
        output_option("--output", "-o", help="Folder for the page and its figures; default: RUN."),
    ] = None,
) -> None:
    """Draw the figures and the self-contained report.html of a run, or print every row of one of its results."""
    from lyapunov_prune.report.page import load_result, write_report

    if run.is_file():
        if output is not None:
            raise LyapunovPruneError("--output is for the page of a whole run, and one file is printed; leave it out")
        result = load_result(run)
        for part in (result, *result.further()):
            show(part, None, full=True)
        return
    say(f"Report: {write_report(run, output)}")


# The commands, each with the arguments of the example below its help, which `tests/cli/test_options.py` parses.
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "demo": (demo, ""),
    "shrink": (shrink, "smollm2-135m --size 5bpw -o small.gguf"),
    "profile": (profile, "smollm2-135m --tokens 2048"),
    "rank": (rank, "smollm2-135m --criterion bi --remove 4"),
    "prune": (prune, "smollm2-135m --remove 25% --mend -o smaller"),
    "compress": (compress, "smollm2-135m --method wanda --sparsity 0.5 -o sparse"),
    "heal": (heal, "smaller --minutes 10 -o healed"),
    "joint": (joint, "smollm2-135m --remove 6 -o without"),
    "export": (export, "smaller -o smaller.gguf --quantize q8_0"),
    "eval": (evaluate, "smaller --against smollm2-135m --speed"),
    "check": (check, "smollm2-135m sparse"),
    "explain": (explain, "smollm2-135m smaller"),
    "sensitivity": (sensitivity, "smollm2-135m --study layer,removal"),
    "hierarchy": (hierarchy, "smollm2-135m smaller"),
    "cache": (cache, "--clear"),
    "theorems": (theorems, "--verify"),
    "report": (report, "runs/smollm2-135m"),
}
for name, (command, arguments) in COMMANDS.items():
    app.command(name, epilog=f"Example: lyapunov-prune {name} {arguments}".rstrip())(flattened(command))


def main() -> None:
    """Entry point: whatever fails is one line on stderr and an exit code (`failures`).

    Typer itself makes Ctrl-C exit code 130.
    """
    arguments = sys.argv[1:]
    if sys.stderr is None:  # closed: print and rich would write to stdout instead
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (as long as the process lives)
    speak_any_language()
    try:
        require_sound_process()
        code = app(arguments or ["--help"], prog_name="lyapunov-prune", standalone_mode=False)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # which typer calls 1, a failed check
            put_aside(sys.__stdout__)
            sys.exit(READER_GONE)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        refusal = as_refusal(error, arguments)
        if is_main() or not refusal.in_all:  # which the main process tells for all
            tell(f"error: {refusal.message}")
        sys.exit(refusal.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
