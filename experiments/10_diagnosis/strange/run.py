"""Kinds of faults planted by somebody who had not read the tests of `explain`, and changes that make up for each other.

    python experiments/10_diagnosis/strange/run.py [--again] [--only NAME]

Tiny families, each file rounded to 4 bits; in turn also another family, a mixture or a GGUF file. before.json holds
what was said of each kind before the tests were mended for it: of the first list at commit 2a1b8fc0, of the second at
1a38efad, made by this file with the package of that commit. Writes strange.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.common import run_command
from experiments.planted import Fault, planted, rounded, stored, tiny
from experiments.statements import table
from experiments.strange import FORMS, LATER, STRANGE, in_form, tokenizers
from lyapunov_prune.diagnosis.diagnose import diagnose
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import Result

HERE = Path(__file__).parent
RESULT, BEFORE = HERE / "strange.json", HERE / "before.json"
SEED = 23
_IDS = torch.randint(3, 250, (2, 64), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Tried:
    """A file of `family` with the fault `planted`, empty for an honest file, and what was `said` of it.

    `right` says whether findings of its kind name all tensors that were touched.
    """

    planted: str
    what: str
    family: str
    right: bool
    said: tuple[str, ...]


@dataclass(frozen=True)
class Tries(Result):
    """Every file that was tried."""

    tried: tuple[Tried, ...]

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame([vars(each) for each in self.tried])


Only = Annotated[list[str] | None, typer.Option(help="first, later, turns, tokenizers, forms, or kinds of the first")]


def main(*, only: Only = None) -> None:
    wanted = set(only or ("first", "later", "turns", "tokenizers", "forms"))
    kept = {_place(each): each for each in (Tries.load(RESULT).tried if only else ())}
    lists: dict[str, Callable[[], Iterable[Tried]]] = {
        "first": partial(_faults, [fault for fault in STRANGE if {"first", fault.name} & wanted]),
        "later": partial(_faults, LATER),
        "turns": _in_turn,
        "tokenizers": _tokenizers,
        "forms": _honest,
    }
    for name, found in lists.items():
        if name in (*wanted, "first"):
            kept |= {_place(each): each for each in found()}
            Tries(tuple(kept.values())).save(RESULT)


def _place(tried: Tried) -> tuple[str, str, str]:
    return tried.planted, tried.what, tried.family


def _faults(faults: Iterable[Fault]) -> Iterator[Tried]:
    for fault in faults:
        for family in fault.families:
            dense = tiny(family, SEED)
            broken, touched = planted(dense, fault)
            yield _judged(fault, family, dense, rounded(broken), touched)


def _in_turn() -> Iterator[Tried]:
    """The kinds of the first list once more: of Gemma 2, of a mixture, and as a GGUF file, in turn."""
    for number, fault in enumerate(fault for fault in STRANGE if set(fault.families) >= {"llama", "qwen2"}):
        family = ("gemma2", "llama", "mixtral")[number % 3]
        dense = tiny(family, SEED)
        try:
            broken, touched = planted(dense, fault)
        except AssertionError:  # a mixture has no matrix of this name
            dense = tiny("gemma2", SEED)
            broken, touched = planted(dense, fault)
        storage, file = stored(broken, "GGUF") if family == "llama" else ("", rounded(broken))
        yield _judged(fault, dense.config.model_type, dense, file, touched, storage)


def _judged(fault: Fault, family: str, dense: Any, file: Any, touched: list[str], what: str = "") -> Tried:
    try:
        findings = diagnose(dense, file, _IDS).findings
        said = tuple(finding.said for finding in findings)
    except (ArithmeticError, ValueError, RuntimeError) as error:  # of the tests that stood before
        findings, said = (), (f"{type(error).__name__}: {error}",)
    right = [finding for finding in findings if finding.kind in fault.kinds]
    told = {name for finding in right for name in finding.tensors}
    whole = len(told) >= len(touched) if what == "GGUF" else told >= set(touched)  # which has names of its own
    tried = Tried(fault.name, what, family, bool(right) and whole, said)
    print(fault.name or f"honest: {what}", family, tried.right, *said[:2], sep=" | ", flush=True)
    return tried


def _tokenizers() -> Iterator[Tried]:
    """Tokenizers and templates; the weights are honest."""
    dense = tiny("llama", SEED)
    for name, kind, mine, theirs in tokenizers():
        fault = Fault(name, (kind,), lambda model: [])
        yield _judged(fault, "llama", wrap(dense, mine), wrap(rounded(dense), theirs), [])
    lost = rounded(dense)
    lost.generation_config.eos_token_id = 0
    yield _judged(Fault("another EOS in the generation config", ("EOS",), lambda model: []), "llama", dense, lost, [])


def _honest() -> Iterator[Tried]:
    """The same model in another form, rounded: what one tensor lost another one got."""
    for what in FORMS:
        for family in ("llama", "qwen2"):
            dense = tiny(family, SEED)
            yield _judged(Fault("", (), lambda model: []), family, dense, rounded(in_form(dense, what)), [], what)


def written() -> dict[str, str]:
    now, then = (Tries.load(file).tried for file in (RESULT, BEFORE))
    names = dict.fromkeys(each.planted for each in now if each.planted)
    own = {fault.name for fault in LATER}
    counted = [[[t for t in tries if t.planted == name] for name in names] for tries in (then, now)]
    rows = []
    for name, old, new in zip(names, *counted, strict=True):
        said = max(new, key=lambda each: each.right).said
        counts = [f"{sum(each.right for each in some)} of {len(some)}" for some in (old, new)]
        rows.append((name, *counts, said[0].replace("|", "\\|") if said else "nothing"))
    found = {
        which: [f"{sum(all(t.right for t in some) for some in tries)} of {len(tries)}" for tries in lists]
        for which, chosen in (("first", names.keys() - own), ("later", own))
        for lists in [[[some for some in tries if some and some[0].planted in chosen] for tries in counted]]
    }
    alarms = [
        f"{sum(bool(t.said) for t in tries if not t.planted)} of {sum(not t.planted for t in tries)}"
        for tries in (then, now)
    ]
    return {
        "before": found["first"][0],
        "after": found["first"][1],
        "later_before": found["later"][0],
        "later_after": found["later"][1],
        "alarms_before": alarms[0],
        "alarms_after": alarms[1],
        "table": table(("planted", "named before", "named after", "said"), rows),
    }


if __name__ == "__main__":
    run_command(main, RESULT, written)
