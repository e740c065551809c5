"""Look at one file alone: what is wrong with it, from one pass over its bytes and without a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from lyapunov_prune.arguments import checked
from lyapunov_prune.diagnosis import by_bytes, by_names
from lyapunov_prune.diagnosis.expected import expected_of
from lyapunov_prune.diagnosis.finding import Finding
from lyapunov_prune.diagnosis.looked import Looked
from lyapunov_prune.diagnosis.packed import packed_matrices
from lyapunov_prune.diagnosis.statistics import look
from lyapunov_prune.diagnosis.stored import open_stored
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.engines import short_cuts_of
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, Result

# A new test is a function and a row here; those that are most certain come first.
FILE_TESTS: tuple[Callable[[Looked], Iterator[Finding]], ...] = (
    by_names.index,
    by_names.config,
    by_names.missing,
    by_names.experts,
    by_names.shapes,
    by_names.header_keys,
    by_bytes.non_finite,
    by_bytes.overflow,
    by_bytes.lost_scales,
    by_bytes.constant,
    by_bytes.saturated,
    by_bytes.end_of_text,
    by_bytes.zero_points,
    by_bytes.order_of_columns,
    by_bytes.duplicates,
    by_bytes.shifted_norms,
    by_bytes.far_from_siblings,
    by_names.tied,
    by_names.unread,
    by_names.special_ids,
    by_names.template,
)


@dataclass(frozen=True)
class FileCheck(Result):
    """What is wrong with the file `model`, the surest first, and what `engines` would do wrong with its layers."""

    model: str
    findings: tuple[Finding, ...]
    engines: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong with the file; what engines do is not the file's fault."""
        return not self.findings

    def to_frame(self) -> pd.DataFrame:
        """One row per fault, and per engine that would be wrong."""
        rows = [(f.places(), f.said, f.certainty, f.known_cause, f.remedy) for f in self.findings + self.engines]
        return pd.DataFrame(rows, columns=["tensors", "wrong", "sure", "known cause", "to do"])

    def headline(self) -> str:
        if self.passed:
            looked = "bytes, names, shapes, settings and tokenizer"
            return f"Nothing is wrong with {self.model} by its {looked}; it was not run."
        return f"{len(self.findings)} fault{'s' * (len(self.findings) > 1)} in {self.model}."

    def answer(self) -> list[str]:
        return [self.headline(), *(finding.said for finding in self.findings)][:LINES]


@checked
def check_file(name: str) -> FileCheck:
    """What is wrong with the checkpoint `name`: a folder, a hub id, a `.gguf` file, or the built-in model.

    Its bytes are read once, a piece at a time, and nothing is run; a file too broken to load is looked at too. An
    honest file has no finding. Raises LyapunovPruneError if there is no such checkpoint.
    """
    stored = open_stored(name)
    if stored.faults and not stored.places:  # what is said of its names and numbers would follow from these
        return FileCheck(name, stored.faults)
    packed = list(packed_matrices(stored))
    looked = Looked(stored, look(stored), packed, expected_of(stored) if stored.config else None)
    found, told = list(stored.faults), set[str]()
    for finding in (finding for test in FILE_TESTS for finding in test(looked)):
        if not finding.tensors or not told.issuperset(finding.tensors):  # the first fault of a tensor explains others
            found.append(finding)
        told.update(finding.tensors)
    order = {"certain": 0, "likely": 1, "possible": 2}
    engines: list[Finding] = []
    with suppress(LyapunovPruneError):  # told above
        for row, where in short_cuts_of(str(stored.header.path) if stored.header is not None else name):
            said = f"{row.engine} {row.does}: {where}."
            helps = "prune --layers keeps the pattern where whole periods go" if row.periodic else ""
            engines.append(Finding("engine", (), said, "possible", row.thread, helps))
    return FileCheck(name, tuple(sorted(found, key=lambda finding: order[finding.certainty])), tuple(engines))
