"""Is a verdict right about tasks that it has not seen: that of `hierarchy`, scored on other items and other sources.

    python experiments/4_hierarchy/verdicts/run.py [--model MODEL] --text A.txt --unseen B.txt --other C.jsonl
        --choices D.jsonl --choices E.jsonl

What is compressed is so on the beginning of `--text`. Per kind of task the verdict is given on one set, and held
against two more: other items of the same source, and another source. Choice: the first items of the first file of
`--choices`; the next ones of it; the first ones of the second file. Retrieval: the first sentence of a passage looks
for the rest of it, in the first half of `--unseen`; in the second half; in `--other`. Generation: greedy texts after
beginnings of windows of the same three.

Laid down before anything was measured. A decision is the option taken (choice), a document among the ten nearest
(retrieval), a token of the dense model's text before the two texts part (generation). The word of a verdict stands for
a range of the share of decisions that stay: `stays` for 0.9 and above, `lost` for below 0.5, `changes` for what is
between. On a held-out set the word is **right** where the share found there lies in its range. Where it does not it is
**refuted** if the 95 % interval of that share (Wilson's, over items) lies outside altogether, and **missed** if not:
too few items to tell. A rule to beat gives each kind one word, whatever the compression: the one that is right most
often, known afterwards. The share itself **holds** where Newcombe's interval of the difference to that found on the
held-out set has 0 in it.

Writes MODEL.json beside this file; what all of them say goes into README.md by `make tables`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from scipy import stats
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, plain, read_text, run_command
from experiments.hierarchies import makers, share_kept, taken
from experiments.retrieval import RetrievalTask, evaluate_retrieval
from experiments.statements import bullets, interval, percent, short, signed, span, table
from lyapunov_prune.data.batch import Split, require_disjoint
from lyapunov_prune.data.choices import ChoiceItem, load_items
from lyapunov_prune.forward.decoding import continued
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.predictions.choices import compare_choices
from lyapunov_prune.predictions.generation import compare_generation
from lyapunov_prune.predictions.history import history_divergence
from lyapunov_prune.predictions.verdict import LOST, STAYS, KindVerdict, task_verdict, wilson
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
# The last is no compression of the paper's: beside it there is something that may stay.
MODELS = ("layers − 4", "attention − 4", "Wanda 50 %", "Wanda 2:4", "4 bits, groups of 64", "8 bits, a row")
KINDS = ("retrieval", "choice", "generation")
SETS = ("same source", "another source")
RANGES = {"stays": (STAYS, np.inf), "changes": (LOST, STAYS), "lost": (-np.inf, LOST)}  # the lower end belongs to it


@dataclass(frozen=True)
class Judged:
    """A kind of task with a compressed model: what the verdict said, and what stayed of what it had not seen.

    `same` and `other`: the shares of an item, query or prompt each, of the two SETS.
    """

    model: str
    said: KindVerdict
    same: np.ndarray
    other: np.ndarray


@dataclass(frozen=True)
class JudgedVerdicts(Result):
    """`sources`: of every kind, what the verdict and the two held-out sets were made of."""

    steps: int
    sources: tuple[tuple[str, ...], ...]
    rows: tuple[Judged, ...]
    calibrated_on: MeasuredOn
    measured_on: MeasuredOn

    def headline(self) -> str:
        return f"{self.measured_on.line()}; compressed on {self.calibrated_on.line()}"


@dataclass(frozen=True)
class Asked:
    """What a kind of task is asked of: `[0]` for the verdict, `[1:]` held out."""

    items: tuple[tuple[ChoiceItem, ...], ...]
    tasks: tuple[RetrievalTask, ...]
    prompts: tuple[lp.TokenBatch, ...]


def main(
    text: Annotated[str, typer.Option(help="to compress on")],
    unseen: Annotated[str, typer.Option(help="passages and beginnings, its halves for the verdict and against it")],
    other: Annotated[str, typer.Option(help="a JSONL of `text`: passages and beginnings of another source")],
    choices: Annotated[list[str], typer.Option(help="two files of items")],
    model: Model = Model(),
    tokens: int = 2048,
    context: int = 256,
    count: Annotated[int, typer.Option(help="items, queries and prompts of each set")] = 36,
    begins: Annotated[int, typer.Option(help="tokens that a text begins with")] = 32,
    steps: Annotated[int, typer.Option(help="tokens of each text")] = 12,
) -> None:
    loaded = model.load()
    learnt = read_text(loaded, text, tokens, context, "all")
    asked = read_sets(loaded, unseen, other, choices, count, begins)
    for prompts in asked.prompts:
        require_disjoint(learnt, prompts)
    origins = learnt.measured_on(loaded.model), asked.prompts[0].measured_on(loaded.model)
    about = {"texts": encode(origins), "sets": digest(asked), "steps": steps}
    made = makers(loaded, learnt)
    made["Wanda 2:4"] = lambda: lp.compress(loaded.model, learnt, method="wanda", pattern="2:4").model
    halves = tuple(f"{plain(unseen)}, {half} half" for half in ("first", "second"))
    sources = {
        "retrieval": (*halves, plain(other)),
        "choice": (*(f"{plain(choices[0])}, {which} items" for which in ("first", "next")), plain(choices[1])),
        "generation": (*halves, plain(other)),
    }
    found = JudgedVerdicts(steps, tuple((kind, *sources[kind]) for kind in KINDS), (), *origins)
    with Store(model.jobs / "verdicts", "verdicts", about) as store:
        if "dense" not in store:
            store.add("dense", encode(decided(loaded, loaded.model, asked, steps)))
        dense = decode(Decisions, store["dense"])
        for name in MODELS:
            if name not in store:
                store.add(name, [encode(row) for row in judged(loaded, name, made[name](), asked, dense, steps)])
            found = replace(found, rows=(*found.rows, *(decode(Judged, row) for row in store[name])))
            found.save(HERE / f"{plain(model.name)}.json")  # cut off, it holds the compressions that are done


def read_sets(loaded: Decoder, unseen: str, other: str, choices: Sequence[str], count: int, begins: int) -> Asked:
    first, second = (told_apart(file) for file in choices)
    halves = passages(Path(unseen).read_text(encoding="utf-8").split("\n"))
    lines = [json.loads(line)["text"] for line in Path(other).read_text(encoding="utf-8").splitlines()]
    elsewhere = passages(" ".join(line.split()) for line in lines)
    middle = len(halves) // 2
    spread = 256  # a window each, of which the beginning is read: neighbours would go on from each other
    parts: tuple[tuple[str, Split], ...] = ((unseen, "calibration"), (unseen, "evaluation"), (other, "all"))
    batches = [read_text(loaded, source, count * spread, spread, split) for source, split in parts]
    return Asked(
        (first[:count], first[count : 2 * count], second[:count]),
        tuple(sought(found, count) for found in (halves[:middle], halves[middle:], elsewhere)),
        tuple(replace(batch, ids=batch.ids[:, :begins]) for batch in batches),
    )


def told_apart(file: str) -> tuple[ChoiceItem, ...]:
    """The items whose choices differ: of two equal ones neither is chosen."""
    return tuple(item for item in load_items(file) if len(set(item.choices)) == len(item.choices))


def passages(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Of every line that has both, a first sentence of 40 to 200 characters and at least 200 characters behind it."""
    parted = (re.split(r"(?<=[.!?])\s+", line.strip(), maxsplit=1) for line in lines if not line.startswith(" ="))
    return [(p[0], p[1]) for p in parted if len(p) == 2 and 40 <= len(p[0]) <= 200 <= len(p[1])]


def sought(found: Sequence[tuple[str, str]], count: int) -> RetrievalTask:
    """`count` queries, each with one answer among a third more documents."""
    found = found[: count * 4 // 3]
    queries = {f"q{i}": sentence for i, (sentence, _) in enumerate(found[:count])}
    documents = {f"d{i}": rest for i, (_, rest) in enumerate(found)}
    sha256 = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    return RetrievalTask("passages", queries, documents, {f"q{i}": {f"d{i}": 1} for i in range(count)}, sha256)


def digest(asked: Asked) -> dict[str, list[str]]:
    return {
        "items": [hashlib.sha256(repr(items).encode()).hexdigest() for items in asked.items],
        "tasks": [task.sha256 for task in asked.tasks],
        "prompts": [batch.text_hash for batch in asked.prompts],
    }


@dataclass(frozen=True)
class Decisions:
    """Of one model on the held-out sets: the options that it takes, and what it writes."""

    chosen: tuple[tuple[int, ...], ...]
    written: tuple[tuple[tuple[int, ...], ...], ...]


def decided(loaded: Decoder, model: PreTrainedModel, asked: Asked, steps: int) -> Decisions:
    chosen = tuple(tuple(taken(model, item, loaded.tokenizer) for item in items) for items in asked.items[1:])
    texts = []
    for batch in asked.prompts[1:]:
        reading = read(lp.wrap(model), batch)
        texts.append(tuple(map(tuple, continued(reading, batch.ids, steps).tolist())))
    return Decisions(chosen, tuple(texts))


def judged(
    loaded: Decoder, name: str, small: PreTrainedModel, asked: Asked, dense: Decisions, steps: int
) -> list[Judged]:
    """The verdict from the first of the sets, and what stayed in the others."""
    model, tokenizer = loaded.model, loaded.tokenizer
    pair = {"dense": model, name: small}
    searched = [evaluate_retrieval(pair, tokenizer, task, context=32, batch_size=8) for task in asked.tasks]
    first = asked.prompts[0]
    found = task_verdict(
        compare_generation(model, small, first, steps=steps, batch_size=len(first)),
        history_divergence(model, small, replace(first, ids=first.ids[:12]), steps=steps, batch_size=12),
        choices=compare_choices(model, small, asked.items[0], tokenizer),
    )
    own = decided(loaded, small, asked, steps)
    kept = {
        "retrieval": [scores.overlap[1] for scores in searched[1:]],
        "choice": [np.equal(*pair).astype(float) for pair in zip(dense.chosen, own.chosen, strict=True)],
        "generation": [share_kept(*map(np.array, pair)) for pair in zip(dense.written, own.written, strict=True)],
    }
    return [Judged(name, one, *kept[one.task]) for one in (searched[0].verdict(), *found.kinds)]


@dataclass(frozen=True)
class Cell:
    """A verdict held against one set: the shares that stayed, an item, query or prompt each."""

    model: str
    compressed: str
    said: KindVerdict
    which: str
    values: np.ndarray

    @property
    def share(self) -> float:
        return float(self.values.mean())

    @property
    def ends(self) -> tuple[float, float]:
        return wilson(self.share, len(self.values))

    @property
    def outcome(self) -> str:
        return self.judged(self.said.word)

    def judged(self, word: str) -> str:
        """`right`, `missed` or `refuted`, as laid down at the top."""
        least, below = RANGES[word]
        low, high = self.ends
        if least <= self.share < below:
            return "right"
        return "missed" if high >= least and low < below else "refuted"

    @property
    def holds(self) -> bool:
        """Whether Newcombe's interval of the difference of the two shares has 0 in it."""
        one, (low, high) = self.said, self.ends
        less = np.hypot(one.same - one.low, high - self.share)
        more = np.hypot(one.high - one.same, self.share - low)
        return bool(-more <= one.same - self.share <= less)

    def shown(self) -> str:
        return f"{in_percent(self.share, *self.ends)}, {self.outcome}"


def in_percent(*three: float) -> str:
    return f"{interval(*(round(100 * x, 9) for x in three))} %"  # a bound of 0 is 1e-15 by rounding


def held_against(results: Sequence[JudgedVerdicts]) -> list[Cell]:
    return [
        Cell(found.measured_on.model.name, row.model, row.said, which, values)
        for found in results
        for row in found.rows
        for which, values in zip(SETS, (row.same, row.other), strict=True)
    ]


def written() -> dict[str, str]:
    results = [JudgedVerdicts.load(path) for path in sorted(HERE.glob("*.json"), reverse=True)]
    cells = held_against(results)
    return {
        "setting": setting(results),
        "verdicts": verdicts(cells),
        "scored": scored(cells),
        "by-word": by_word(cells),
        **numbers(cells),
    }


def setting(results: Sequence[JudgedVerdicts]) -> str:
    first = results[0]
    return bullets(
        *(found.headline() for found in results),
        *(f"{kind}: {on}; held out: {same}; {other}" for kind, on, same, other in first.sources),
        f"{span(len(row.same) for row in first.rows)} items, queries and prompts a set; {first.steps} tokens of each "
        "text",
    )


def verdicts(cells: Sequence[Cell]) -> str:
    sets = (f"held out, {name}" for name in SETS)
    head = ("model", "compressed", "task", "verdict", "stays", "certain", "own text", *sets)
    rows = []
    for same, other in zip(cells[::2], cells[1::2], strict=True):
        one = same.said
        stays, certain = in_percent(one.same, one.low, one.high), percent(one.certain)
        returns = None if np.isnan(one.returns) else f"{short(one.returns)} × KL"
        name = (same.model, same.compressed, one.task)
        rows.append((*name, one.word, stays, certain, returns, same.shown(), other.shown()))
    return table(head, rows)


def rule(cells: Sequence[Cell]) -> dict[str, str]:
    """Of every kind the one word that is right most often, known afterwards."""
    return {
        kind: max(RANGES, key=lambda word: sum(c.judged(word) == "right" for c in cells if c.said.task == kind))
        for kind in KINDS
    }


def right_of(cells: Sequence[Cell]) -> str:
    """`9 of 12, 75 (47–91) %`, Wilson's interval as if the cells were independent."""
    right = sum(cell.outcome == "right" for cell in cells)
    return f"{right} of {len(cells)}, {in_percent(right / len(cells), *wilson(right / len(cells), len(cells)))}"


def order(cells: Sequence[Cell]) -> str:
    """Spearman's correlation of the shares; of so few sets its p is none worth the name."""
    return signed(float(stats.spearmanr([c.said.same for c in cells], [c.share for c in cells]).statistic))


def scored(cells: Sequence[Cell]) -> str:
    head = ("held out", "right", "missed", "refuted", "one word a kind", "share holds", "mean difference", "order")
    words = rule(cells)
    groups = {
        f"{kind}, {which}": [c for c in cells if (c.said.task, c.which) == (kind, which)]
        for kind in KINDS
        for which in SETS
    } | {"all": list(cells)}
    rows = []
    for name, some in groups.items():
        beside = sum(c.judged(words[c.said.task]) == "right" for c in some)
        word = f"{beside}" if name == "all" else f"{beside} (`{words[some[0].said.task]}`)"
        failed = (sum(c.outcome == how for c in some) for how in ("missed", "refuted"))
        difference = percent(float(np.mean([abs(c.said.same - c.share) for c in some])))
        share = sum(c.holds for c in some)
        rows.append((name, right_of(some), *failed, word, share, difference, order(some)))
    return table(head, rows)


def numbers(cells: Sequence[Cell]) -> dict[str, str]:
    generated = {(c.model, c.compressed, c.which): c.share for c in cells if c.said.task == "generation"}
    others = [c for c in cells if c.said.task != "generation"]
    least = sum(generated[c.model, c.compressed, c.which] < c.share for c in others)
    return {
        "right": right_of(cells),
        **{f"right-{kind}": right_of([c for c in cells if c.said.task == kind]) for kind in KINDS},
        "refuted": str(sum(c.outcome == "refuted" for c in cells)),
        "by-rule": str(by_rule(cells)),
        "generation-least": f"{least} of {len(others)}",
    }


def by_rule(cells: Sequence[Cell]) -> int:
    words = rule(cells)
    return sum(c.judged(words[c.said.task]) == "right" for c in cells)


def by_word(cells: Sequence[Cell]) -> str:
    """How often each word of the verdict is right, and the shares of decisions that stay there."""
    rows = []
    for word in RANGES:
        if some := [c for c in cells if c.said.word == word]:
            rows.append((f"`{word}`", right_of(some), f"{span(100 * c.share for c in some)} %"))
    return table(("the verdict says", "right", "decisions that stay"), rows)


if __name__ == "__main__":
    run_command(main, HERE / "{model}.json", written)
