"""Faults planted in files that are honestly rounded otherwise, and honest files: what `explain` says of each.

    python experiments/10_diagnosis/diagnosis/run.py [--model MODEL] [--again]

Six tiny families, in GGUF files, packed safetensors and plain ones of 4 bits; then MODEL, in memory. The thresholds of
the tests were set on models of other seeds. Writes diagnosis.json.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import BUILT_IN, Model, run_command
from experiments.planted import (
    FAMILIES,
    FAULTS,
    Fault,
    averaged,
    byte_tokenizer,
    each,
    planted,
    rotary,
    rounded,
    stored,
    tiny,
    trained,
    with_adapters,
)
from experiments.statements import table
from lyapunov_prune.diagnosis.diagnose import diagnose
from lyapunov_prune.diagnosis.finding import Diagnosis
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import Result

HERE = Path(__file__).parent
RESULT = HERE / "diagnosis.json"
UNFINISHED = Path("runs") / "experiments" / "diagnosis.json"  # an interrupted run goes on with the next part
SEED = 11
STORAGES = ("GGUF", "packed", "safetensors")
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "rtn", "bits": 3},
    {"method": "rtn", "bits": 2, "group_size": 32},
    {"method": "gptq", "bits": 4},
    {"method": "awq", "bits": 4, "group_size": 32},
    {"method": "sparsegpt", "sparsity": 0.5},
    {"method": "wanda", "sparsity": 0.5},
    {"method": "magnitude", "sparsity": 0.7},
    {"method": "svd", "rank": 16},
)
_IDS = torch.randint(3, 250, (2, 64), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Tried:
    """A file of `family` in `storage` with the fault `planted`, empty for an honest file, and what was `said` of it.

    `right` says whether one finding names the fault by kind and all its tensors, and `others` counts those that name
    anything else.
    """

    planted: str
    family: str
    storage: str
    right: bool
    others: int
    said: tuple[str, ...]


@dataclass(frozen=True)
class Tries(Result):
    """Every file that was tried, in the parts that are `done`."""

    tried: tuple[Tried, ...]
    done: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame([vars(each) for each in self.tried])


def main(*, model: Model = Model(BUILT_IN)) -> None:
    parts: dict[str, Callable[[], Iterable[Tried]]] = {
        "faults": _faults,
        "tokenizers": _tokenizers,
        "honest": _honest,
        "trained": partial(_large, model),
    }
    kept = Tries.load(UNFINISHED) if UNFINISHED.is_file() else Tries((), ())
    for name, part in parts.items():
        if name not in kept.done:
            kept = Tries((*kept.tried, *part()), (*kept.done, name))
            kept.save(UNFINISHED)
    kept.save(RESULT)
    UNFINISHED.unlink()


def _faults() -> Iterator[Tried]:
    """Every fault in its families in turn, with storages in turn: at least 60 files."""
    for number, fault in enumerate([*FAULTS, *FAULTS[: 62 - len(FAULTS)]]):
        later = number // len(FAULTS)
        family = fault.families[(number + later) % len(fault.families)]
        dense = tiny(family, SEED + later)
        broken, touched = planted(dense, fault)
        storage, file = stored(broken, STORAGES[(number + later) % 3])
        yield _judged(fault.name, family, storage, diagnose(wrap(dense, byte_tokenizer()), file, _IDS), fault, touched)


def _judged(name: str, family: str, storage: str, found: Diagnosis, fault: Fault, touched: list[str]) -> Tried:
    right = [finding for finding in found.findings if finding.kind in fault.kinds]
    told = {name for finding in right for name in finding.tensors}
    # A GGUF file has names of its own: there the number of tensors is compared.
    own = any(name.startswith(("blk.", "output", "token_embd")) for name in told)
    whole = len(told) >= len(touched) if own else told >= set(touched)
    said = tuple(finding.said for finding in found.findings)
    tried = Tried(name, family, storage, bool(right) and whole, len(found.findings) - len(right), said)
    print(tried.planted or "honest", family, storage, tried.right, tried.others, *said[:2], sep=" | ", flush=True)
    return tried


def _tokenizers() -> Iterator[Tried]:
    """Tokenizers and templates that differ; the weights are honest."""
    dense = tiny("llama", SEED)
    chat = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"

    def other(**changes: Any) -> Any:
        made = byte_tokenizer()
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    def reordered() -> Any:
        made = byte_tokenizer()
        text = made.backend_tokenizer.to_str().replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
        made._tokenizer = type(made.backend_tokenizer).from_str(text)
        return made

    cases = (
        ("another EOS", "EOS", other(), other(eos_token="<pad>")),
        ("another BOS", "BOS", other(), other(bos_token="<pad>")),
        ("another template", "template", other(chat_template=chat), other(chat_template=chat + "x")),
        ("BOS twice", "template", other(chat_template=chat), other(chat_template="{{ bos_token }}" + chat)),
        ("two tokens exchanged", "vocabulary", other(), reordered()),
    )
    for name, kind, mine, theirs in cases:
        found = diagnose(wrap(dense, mine), wrap(rounded(dense), theirs), _IDS)
        fault = Fault(name, (kind,), lambda model: [])
        yield _judged(name, "llama", "in memory", found, fault, [])


def _honest() -> Iterator[Tried]:
    """Honest files: each quantisation, pruned, healed, merged, cast."""
    none = Fault("", (), lambda model: [])
    for family in FAMILIES:
        dense = tiny(family, SEED)
        part = ("proj",) if family in ("phi3", "gpt2") else ("q_proj", "v_proj")
        learnt, adapted = trained(dense), with_adapters(dense, 0.1, part)
        made: dict[str, Callable[[], PreTrainedModel]] = {
            "8 bits": partial(rounded, dense, "Q8_0"),
            "IQ4_NL": partial(rounded, dense, "IQ4_NL"),
            "5 bits": partial(rounded, dense, "Q5_1"),
            "bfloat16": partial(rounded, dense, "BF16"),
            "healed": partial(rounded, learnt),
            "upper layers trained": partial(trained, dense, r"\.[34]\."),
            "adapters merged": partial(rounded, adapted),
            "merged": partial(averaged, dense, [learnt, adapted]),
            **{" ".join(map(str, options.values())): partial(_compressed, dense, options) for options in METHODS},
        }
        for storage, file in (stored(dense, "GGUF"), stored(dense, "packed")):
            found = diagnose(wrap(dense, byte_tokenizer()), file, _IDS)
            yield _judged("", family, f"{storage}, 4 bits", found, none, [])
        for what, make in made.items():
            try:
                changed = make()
            except LyapunovPruneError:  # the method does not take this family
                continue
            yield _judged("", family, what, diagnose(dense, changed, _IDS), none, [])
        if family != "gpt2":
            found = diagnose(dense, rounded(lp.remove_layers(dense, [2])), _IDS, kept=(0, 1, 3, 4))
            yield _judged("", family, "a layer removed, 4 bits", found, none, [])


def _compressed(model: PreTrainedModel, options: dict[str, Any]) -> PreTrainedModel:
    return lp.compress(model, _IDS.repeat(3, 1), **options).model


def _large(model: Model) -> Iterator[Tried]:
    """The same of a trained model, in memory."""
    dense = model.load()
    layer = dense.structure.num_layers // 2
    size = dense.structure.config.head_dim
    faults = (
        Fault("a constant", ("constant",), each(r"layers\.2\d\..*o_proj", lambda W: torch.full_like(W, 0.01))),
        Fault("norms plus one", ("shift",), each("norm", lambda w: w + 1)),
        Fault(
            "the other rotary layout",
            ("permuted",),
            each("[qk]_proj", partial(rotary, size=size)),
        ),
        Fault("inverted sign", ("sign",), each(rf"layers\.{layer}\..*down_proj", torch.neg)),
        Fault("", (), lambda made: []),
    )
    for fault in faults:
        made = copy.deepcopy(dense.model)
        touched = fault.plant(made)
        found = diagnose(dense, rounded(made), _IDS)
        tried = _judged(fault.name, model.name, "4 bits in memory", found, fault, touched)
        yield tried if fault.name else replace(tried, right=False)


def written() -> dict[str, str]:
    tried = Tries.load(RESULT).tried
    broken, honest = ([each for each in tried if bool(each.planted) is wanted] for wanted in (True, False))
    names = dict.fromkeys(each.planted for each in broken)
    rows = []
    for name in names:
        own = [each for each in broken if each.planted == name]
        storages = Counter(each.storage for each in own)
        said = max(own, key=lambda each: each.right).said
        rows.append(
            (
                name,
                f"{sum(each.right for each in own)} of {len(own)}",
                ", ".join(dict.fromkeys(each.family for each in own)),
                ", ".join(storages),
                said[0].replace("|", "\\|") if said else "nothing",
            )
        )
    alarms = [each for each in honest if each.said]
    return {
        "found": f"{sum(each.right for each in broken)} of {len(broken)}",
        "kinds": str(len(names)),
        "extra": str(sum(each.others for each in broken)),
        "alarms": f"{len(alarms)} of {len(honest)}",
        "table": table(("planted", "named", "family", "file", "said"), rows),
        "honest": table(
            ("file", "alarms"),
            [
                (storage, f"{sum(bool(e.said) for e in honest if e.storage == storage)} of {count}")
                for storage, count in Counter(each.storage for each in honest).items()
            ],
        ),
    }


if __name__ == "__main__":
    run_command(main, RESULT, written)
