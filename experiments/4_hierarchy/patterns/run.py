"""Half of the weights gone within layers, alone or as 4:8 and 2:4, by kind of task (representation hierarchies, Figures
3 and 9).

    python experiments/4_hierarchy/patterns/run.py [--model MODEL] --text A.txt --choices hellaswag.jsonl \
        --questions gsm8k.jsonl

The paper has accuracy on HellaSwag and exact match on GSM8K, of models of 7 billion parameters. A small model solves no
question of GSM8K (`two_kinds`), so there is nothing to lose in exact match: measured are the log-likelihood of the
answer that the file has, and how much of the dense model's own greedy answer a compressed model writes too.

Laid down before anything was measured: a loss of accuracy is mild where less than half of what the dense model has
above guessing is gone. Added afterwards, as so few items tell little: it is decided where the intervals of all patterns
say so, or that of one the contrary. Writes patterns.json beside this file, of another model in a folder by its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from experiments.common import Model, plain, read_text, run_command
from experiments.hierarchies import interval, patterned, share_kept, taken
from experiments.statements import bullets, percent, table
from experiments.statements import interval as said
from lyapunov_prune.data.batch import rows_measured_on
from lyapunov_prune.data.choices import ChoiceItem, load_items
from lyapunov_prune.data.text import start_ids
from lyapunov_prune.forward.decoding import continued
from lyapunov_prune.forward.reading import read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.tokenizers import token_ids
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
METHODS = ("Wanda", "SparseGPT")
PATTERNS = ("50 %", "4:8", "2:4")  # the more structured, the later


@dataclass(frozen=True)
class Row:
    """A model: the option that it takes of every item, the loss of every reference answer, nats a token, its texts."""

    model: str
    taken: np.ndarray
    losses: np.ndarray
    texts: np.ndarray


@dataclass(frozen=True)
class Patterns(Result):
    """The dense model first; `chance`: what guessing scores in accuracy."""

    rows: tuple[Row, ...]
    gold: np.ndarray
    chance: float
    choices: str
    questions: str
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn

    def row(self, model: str) -> Row:
        return next(row for row in self.rows if row.model == model)

    def right(self, row: Row) -> np.ndarray:
        return (row.taken == self.gold).astype(float)

    def kept(self, row: Row) -> np.ndarray:
        """Of every question, the share of the dense text that stands before the texts part."""
        return share_kept(self.rows[0].texts, row.texts)

    def headline(self) -> str:
        dense = self.rows[0]
        return (
            f"The first {len(self.gold)} items of {self.choices}, the first {len(dense.losses)} questions of "
            f"{self.questions} with {dense.texts.shape[1]} tokens of each text: "
            f"{self.measured_on.line()}; compressed on {self.calibrated_on.line()}"
        )


def main(
    text: Annotated[str, typer.Option(help="to compress on")],
    choices: Annotated[Path, typer.Option(help="items")],
    questions: Annotated[Path, typer.Option(help="questions and answers")],
    model: Model = Model(),
    tokens: int = 2048,
    context: int = 256,
    items: int = 24,
    asked: Annotated[int, typer.Option(help="questions")] = 12,
    steps: Annotated[int, typer.Option(help="tokens of each text")] = 12,
) -> None:
    loaded = model.load()
    learnt = read_text(loaded, text, tokens, context, "all")
    origin = learnt.measured_on(loaded.model)
    some = load_items(choices)[:items]
    lines = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()[:asked]]
    about = {"text": encode(origin), "items": encode(some), "questions": lines, "steps": steps}
    made = {"dense": lambda: loaded.model} | patterned(loaded, learnt)
    with Store(model.jobs / "patterns", "patterns", about) as store:
        for name, make in made.items():
            if name not in store:
                store.add(name, encode(measured(name, loaded, make(), some, lines, steps)))
        rows = tuple(decode(Row, store[name]) for name in made)
    chance = float(np.mean([1 / len(item.choices) for item in some]))
    gold = np.array([item.gold for item in some])
    files = plain(str(choices)), plain(str(questions))
    found = Patterns(rows, gold, chance, *files, asked_of(loaded, some, lines, *files), origin)
    found.save(model.folder(HERE) / "patterns.json")


def asked_of(
    loaded: Decoder, items: tuple[ChoiceItem, ...], lines: list[dict[str, str]], choices: str, questions: str
) -> MeasuredOn:
    """The record of all items and questions: each item's choices after its stem, each question's answer after it."""
    start = start_ids(loaded.tokenizer)
    told = [item.stem + choice for item in items for choice in item.choices]
    told += [f"Question: {line['question']}\nAnswer: {line['answer']}" for line in lines]
    rows = [start + token_ids(loaded.tokenizer, text) for text in told]
    return rows_measured_on(loaded.model, rows, f"{choices}, {questions}", bos=bool(start))


@torch.no_grad()
def measured(
    name: str,
    loaded: Decoder,
    model: PreTrainedModel,
    items: tuple[ChoiceItem, ...],
    lines: list[dict[str, str]],
    steps: int,
) -> Row:
    tokenizer = loaded.tokenizer
    start = start_ids(tokenizer)
    losses, texts = [], []
    for line in lines:
        begun = start + token_ids(tokenizer, f"Question: {line['question']}\nAnswer:")
        answer = token_ids(tokenizer, f" {line['answer']}")
        ids = torch.tensor([begun + answer], device=model.device)
        logits = lift(model(ids).logits[0, len(begun) - 1 : -1])
        losses.append(float(cross_entropy(logits, ids[0, len(begun) :])))
        prompt = torch.tensor([begun])
        texts.append(continued(read(wrap(model), prompt), prompt, steps)[0].tolist())
    chosen = [taken(model, item, tokenizer) for item in items]
    return Row(name, np.array(chosen), np.array(losses), np.array(texts))


def written(folder: Path = HERE) -> dict[str, str]:
    found = Patterns.load(folder / "patterns.json")
    return {"setting": bullets(found.headline()), "patterns": patterns(found), "chance": percent(found.chance)}


def in_percent(values: np.ndarray) -> str:
    return f"{said(*(100 * interval(values)))} %"


def perplexity(losses: np.ndarray) -> str:
    """`exp` of the mean over questions of a loss, or of a difference of losses, with its interval."""
    return said(*np.exp(interval(losses)))


def patterns(found: Patterns) -> str:
    answer = ("perplexity of the answer", "× the row before")
    head = ("", "right", "− dense, points", "the dense option taken", *answer, "dense text kept")
    dense = found.rows[0]
    right = in_percent(found.right(dense))
    rows: list[tuple[object, ...]] = [("dense", right, None, None, perplexity(dense.losses), None, None)]
    for method in METHODS:
        before = dense
        for pattern in PATTERNS:
            row = found.row(f"{method} {pattern}")
            change = said(*(100 * interval(found.right(row) - found.right(dense)))).replace("-", "−")
            same = in_percent((row.taken == dense.taken).astype(float))
            worse = f"{perplexity(row.losses - dense.losses)} × dense", perplexity(row.losses - before.losses)
            rows.append((row.model, in_percent(found.right(row)), change, same, *worse, in_percent(found.kept(row))))
            before = row
    return table(head, rows)


if __name__ == "__main__":
    run_command(main, HERE / "patterns.json", written)
