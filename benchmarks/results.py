"""What `make bench` measured: a JSON file a command beside this one, and the table of docs/speed.md."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lyapunov_prune.evaluation.speed import SpeedRow
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.result import versions

HERE = Path(__file__).parent
COMMANDS = (
    "run",
    "on_disk",
    "gguf_copy",
    "engine",
    "vocabulary",
    "streamed",
    "healing",
    "explaining",
    "experts",
    "gpu",
)


@dataclass(frozen=True)
class Ratio:
    """How much of `against` the job `what` needs, and what it may need at most."""

    what: str
    against: str
    ratio: float
    limit: float


@dataclass(frozen=True)
class Row:
    """What a command or a tool took on a model, in seconds of the processor.

    `forward` is that of a plain forward run before and after, and `arithmetic` how many of these have as many
    products as it took, None where nothing counted them. Where layers go, `ratio` is the perplexity over the dense one,
    with its interval. Of a tool that could not, `said` is its message.
    """

    model: str
    what: str
    seconds: float | None = None
    forward: float | None = None
    arithmetic: float | None = None
    removed: str = "none"
    ratio: tuple[float, float, float] | None = None
    said: str = ""


@dataclass
class Benchmark:
    """The ratios of one run of `command`, printed as they come and kept when it has ended."""

    command: str
    rows: list[Ratio] = field(default_factory=list)

    def add(self, what: str, against: str, ratio: float, limit: float) -> None:
        self.rows.append(Ratio(what, against, float(f"{ratio:.4g}"), limit))
        met = "ok" if ratio <= limit else "OVER"
        print(f"{what + ' / ' + against:<78} {ratio:5.2f}  limit {limit:.2f}  {met}", flush=True)

    def add_speed(self, row: SpeedRow, dense: SpeedRow, prefill: int | None = None) -> None:
        """Time per token of a smaller model, and of a prompt of `prefill` tokens, over the dense time × its share."""
        kept, against = row.parameters / dense.parameters, "dense time × kept parameters"
        self.add(f"time per token, {row.model}", against, dense.decode / row.decode / kept, 1.10)
        if prefill:
            self.add(f"prefill of {prefill}, {row.model}", against, dense.prefill / row.prefill / kept, 1.10)

    def save(self) -> None:
        about = {"machine": machine(), "versions": versions(), "source": f"one run of benchmarks/{self.command}.py"}
        content = {**about, "ratios": [asdict(row) for row in self.rows]}
        write_whole(HERE / f"{self.command}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def save_row(row: Row, on: str) -> None:
    """Keep a row in whole.json, in place of one of the same model and job; `on` says what it was measured on."""
    rows = rows_of(row.model, on) | {row.what: row}
    kept = _kept() | {row.model: {**_about(on), "rows": [asdict(each) for each in rows.values()]}}
    write_whole(HERE / "whole.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def rows_of(model: str, on: str) -> dict[str, Row]:
    """The rows of a model in whole.json by job, if they were measured on the same, by the same versions and machine."""
    kept, about = _kept().get(model, {}), _about(on)
    same = about == {key: kept.get(key) for key in about}
    return {row["what"]: Row(**row) for row in kept["rows"]} if same else {}


def _about(on: str) -> dict[str, Any]:
    return {"machine": machine(), "versions": versions(), "on": on}


def _kept() -> dict[str, Any]:
    """What whole.json holds, by model."""
    file = HERE / "whole.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def whole() -> dict[str, str]:
    """The table of whole commands, and what it was measured on."""
    kept = _kept()
    head = (
        "model",
        "what",
        "processor time",
        "its products",
        "time over them",
        "layers that go",
        "perplexity over dense",
    )
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for content in kept.values():
        for row in (Row(**row) for row in content["rows"]):
            lines.append(f"| {row.model} | {row.what} | {' | '.join(_cells(row))} |")
    about = [f"- {content['on']}; {content['machine']}" for content in kept.values()]
    return {"whole": "\n".join(lines) + "\n", "whole_source": "\n".join(about) + "\n"}


def _cells(row: Row) -> list[str]:
    if row.seconds is None or row.forward is None:
        return [f"cannot: {row.said}", "—", "—", "—", "—"]
    ratio = "—" if row.ratio is None else "{:.3g} ({:.3g}–{:.3g})".format(*row.ratio)
    if row.arithmetic is None:
        return [f"{row.seconds:.0f} s", "—", "—", row.removed, ratio]
    products = row.arithmetic * row.forward
    return [f"{row.seconds:.0f} s", f"{products:.0f} s", f"{row.seconds / products:.2f}", row.removed, ratio]


def machine() -> str:
    """The processor and how many of its cores this process may use (Linux)."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def written() -> dict[str, str]:
    """The table of all ratios, and where they are from."""
    kept = {command: HERE / f"{command}.json" for command in COMMANDS}
    found = {command: json.loads(file.read_text(encoding="utf-8")) for command, file in kept.items() if file.is_file()}
    lines = ["| what | against | ratio | limit |", "| --- | --- | --- | --- |"]
    for content in found.values():
        for row in (Ratio(**row) for row in content["ratios"]):
            missed = ", **missed**" if row.ratio > row.limit else ""
            lines.append(f"| {row.what} | {row.against} | {row.ratio:.3g} | {row.limit:.2f}{missed} |")
    about = [f"- `benchmarks/{name}.py`: {content['source']}; {content['machine']}" for name, content in found.items()]
    return {"ratios": "\n".join(lines) + "\n", "source": "\n".join(about) + "\n", **whole()}


if __name__ == "__main__":
    print(written()["ratios"], end="")
