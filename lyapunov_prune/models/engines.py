"""What serving engines and converters would do wrong with a checkpoint whose layers no longer follow a pattern.

No engine is run: a checkpoint is compared with the known cases in `short_cuts`, and one without findings may still
fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lyapunov_prune.models.folder import read_config
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.loading import checkpoint_folder
from lyapunov_prune.models.short_cuts import ALL, SHORT_CUTS, Told
from lyapunov_prune.models.structure import LAYER_COUNTS
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, Result


@dataclass(frozen=True)
class Finding:
    """A short cut that affects a checkpoint: the engine, what it would do and `where`, the thread, and the remedy."""

    engine: str
    does: str
    where: str
    thread: str
    helps: str


@dataclass(frozen=True)
class EngineCheck(Result):
    """The short cuts of engines that affect the checkpoint `model`, out of `known` ones."""

    model: str
    findings: tuple[Finding, ...]
    known: int

    @property
    def passed(self) -> bool:
        return not self.findings

    def to_frame(self) -> pd.DataFrame:
        rows = [(f.engine, f.does, f.where, f.thread, f.helps) for f in self.findings]
        return pd.DataFrame(rows, columns=["engine", "would", "where", "thread", "helps"])

    def headline(self) -> str:
        if self.passed:
            return f"{self.model} trips over none of {self.known} known short cuts of engines; none of them was run"
        return f"{self.model} trips over {len(self.findings)} of {self.known} known short cuts of engines"

    def answer(self) -> list[str]:
        lines = [f"{self.headline()}."]
        for f in self.findings:
            lines.append(f"{f.engine} {f.does}: {f.where} ({f.thread}){f'; {f.helps}' if f.helps else ''}.")
        return lines[:LINES]


def check_engines(name: str) -> EngineCheck:
    """Compare the layers that the checkpoint `name` describes with `SHORT_CUTS`; no weights are read.

    `name` is a folder, a hub id or a GGUF file; raises LyapunovPruneError for anything else.
    """
    told = _told(name)
    findings = []
    for row in SHORT_CUTS:
        where = row.trips(told) if ALL in row.families or told.family in row.families else ""
        if where:
            helps = "prune --keep-period keeps the pattern" if row.periodic else ""
            findings.append(Finding(row.engine, row.does, where, row.thread, helps))
    return EngineCheck(name, tuple(findings), len(SHORT_CUTS))


def _told(name: str) -> Told:
    if name.endswith(".gguf"):
        header = read_header(Path(name))
        return Told(header.architecture, header.layers, header=header)
    config = read_config(checkpoint_folder(name))
    text = config.get_text_config(decoder=True)
    layers = next((n for count in LAYER_COUNTS if (n := getattr(text, count, None))), 0)
    return Told(str(text.model_type), layers, text)
