"""What a test of a file finds, and the result that holds everything found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lyapunov_prune.errors import printable
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, Result

Certainty = Literal["certain", "likely", "possible"]
AGAIN = "convert the original checkpoint again"  # the commonest remedy
_NAMED = 3  # tensors of a fault that a table names
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert, in the name of a tensor


def unnumbered(name: str) -> str:
    """The role of a tensor, which its peers in other layers and experts share: its name with `*` for each number."""
    return NUMBER.sub("*", name)


@dataclass(frozen=True)
class Finding:
    """One fault of a file.

    `kind` is one or two words ("shift", "constant"); `tensors` are the names of the tensors in the file, none for a
    setting or the tokenizer; `said` is one sentence, with a full stop, that names the tensors and what is wrong with
    them. `known_cause` is what made such a thing in known cases, and `remedy` what to do, both empty if unknown.
    `share` is the part of the error, 0 to 1, that goes if this alone is put right (it may be below zero); None if
    it was not measured.
    """

    kind: str
    tensors: tuple[str, ...]
    said: str
    certainty: Certainty
    known_cause: str = ""
    remedy: str = ""
    share: float | None = None

    def places(self) -> str:
        """The tensors for a table: three of them by name, and how many more there are."""
        more = len(self.tensors) - _NAMED
        return ", ".join(self.tensors[:_NAMED]) + f" and {more} more" * (more > 0)

    def line(self) -> str:
        """The sentence, with the share of the error and the known cause behind it."""
        share = "" if self.share is None else f" Put right alone, it takes {self.share:.0%} of the error away."
        sure = "" if self.certainty == "certain" else f" ({self.certainty})"
        cause = self.known_cause and f" Known cause: {self.known_cause}."
        return printable(f"{self.said.rstrip('.')}{sure}.{share}{cause}")


@dataclass(frozen=True)
class Diagnosis(Result):
    """The faults found in the file `model`, those that matter most first; none for an honest file.

    `storage` says in one sentence how far the weights are off as a whole, and what explains it; empty if not known.
    `coarser` says whether the dense model is rounded more coarsely than the file, so that the two may be swapped.
    """

    model: str
    findings: tuple[Finding, ...]
    storage: str = ""
    coarser: bool = False

    def to_frame(self) -> pd.DataFrame:
        """One row per fault."""
        columns = ("kind", "tensors", "certainty", "share", "said")
        found = [(f.kind, f.places(), f.certainty, f.share, f.said) for f in self.findings]
        return pd.DataFrame(found, columns=list(columns))

    def answer(self) -> list[str]:
        return [finding.line() for finding in self.findings[:LINES]] or [self.storage or "No fault was found."]
