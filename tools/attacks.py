"""Draw hostile inputs for an hour: `make attacks`.

    python tools/attacks.py [--minutes 60] [--examples 40]

The tests of drawn inputs (`tests/cli/test_drawn.py`, `test_attacked.py`) run round after round, each with `--examples`
new ones, until the time is over; a round is not cut short. Writes attacks.json beside this file, from which `make
tables` writes what docs/mutants.md says of it. Exit code 1 when an input was not handled as promised; its test says
which.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from hypothesis.statistics import collector

from experiments.statements import table
from lyapunov_prune.results.files import write_whole

REPOSITORY = Path(__file__).resolve().parents[1]
FOUND = Path(__file__).with_name("attacks.json")
TESTS = ("tests/cli/test_drawn.py", "tests/cli/test_attacked.py")


class Counted:
    """Of every test how many inputs it was given, and those that it failed on."""

    def __init__(self) -> None:
        self.inputs: Counter[str] = Counter()
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        def count(statistics: dict[str, Any]) -> None:
            cases = statistics.get("generate-phase", {}).get("test-cases", ())
            self.inputs[item.nodeid.split("[")[0]] += sum(case["status"] != "invalid" for case in cases)

        with collector.with_value(count):
            yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def main(
    minutes: Annotated[float, typer.Option(help="rounds begin for so long")] = 60,
    examples: Annotated[int, typer.Option(help="of each test and round")] = 40,
) -> None:
    os.environ["LYAPUNOV_PRUNE_EXAMPLES"] = str(examples)
    counted, begun, rounds, ended = Counted(), time.monotonic(), 0, 0
    while time.monotonic() - begun < 60 * minutes and not ended:
        ended = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *TESTS], plugins=[counted]))
        rounds += 1
    if ended and not counted.failed:
        raise RuntimeError(f"the tests could not be run: pytest ended with {ended}")
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    about = {"commit": git.stdout.strip(), "minutes": (time.monotonic() - begun) / 60, "rounds": rounds}
    write_whole(FOUND, json.dumps({**about, "inputs": counted.inputs, "failed": counted.failed}, indent=1))
    raise typer.Exit(ended)


def written() -> dict[str, str]:
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    rows = [(f"`{test.split('::')[1]}`", count) for test, count in found["inputs"].items()]
    rows.append(("all", sum(found["inputs"].values())))
    ended = f"not handled as promised: {', '.join(found['failed'])}" if found["failed"] else "all handled as promised"
    setting = f"Commit {found['commit'][:12]}: {found['minutes']:.0f} minutes, {found['rounds']} rounds; {ended}.\n"
    return {"setting": setting, "inputs": table(("test", "inputs drawn"), rows)}


if __name__ == "__main__":
    typer.run(main)
