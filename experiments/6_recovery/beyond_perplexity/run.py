"""What a removal costs beyond perplexity: four tasks and greedy text of the dense model, cut, mended and healed.

    python experiments/6_recovery/beyond_perplexity/run.py [--model MODEL] --choices FILE.jsonl… --text FILE \
        --unseen FILE

No paper has it. Layers go by the default criterion; the gaps are mended, and the mended model healed, on the beginning
of `--text`. Perplexity and prompts are of `--unseen`, the tasks lm-evaluation-harness' (extra `tasks`). Writes
costs.json beside this file, of another model in a folder by its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from scipy import stats

import lyapunov_prune as lp
from experiments.common import Learnt, Model, plain_tasks, run_command
from experiments.statements import bullets, interval, percent, ratio, runs, short, table
from experiments.unseen import recovered, two_texts
from lyapunov_prune.evaluation.repetition import repetition
from lyapunov_prune.evaluation.task_scores import TaskScores
from lyapunov_prune.predictions.generation import GenerationDivergence, compare_generation
from lyapunov_prune.ranking.table import DEFAULT
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
STATES = ("dense", "cut", "mended", "healed")
STEPS = 100  # of healing
NGRAM = 3


@dataclass(frozen=True)
class State:
    """A model: the losses of the unseen windows, the tasks, and what it writes beside the dense model (not its own)."""

    name: str
    windows: np.ndarray
    tasks: TaskScores
    text: GenerationDivergence | None


@dataclass(frozen=True)
class Costs(Result):
    """The states in the order of STATES, the dense model first."""

    removed: tuple[int, ...]
    states: tuple[State, ...]
    learnt_on: MeasuredOn
    measured_on: MeasuredOn

    @property
    def dense(self) -> State:
        return self.states[0]

    def accuracies(self, state: State) -> dict[str, np.ndarray]:
        """By task, right or wrong of each item."""
        scores = (state.tasks.score(state.tasks.models[0], task.name, "acc") for task in state.tasks.tasks)
        return {score.task: np.array(score.items) for score in scores}

    def headline(self) -> str:
        return (
            f"Without layers {runs(self.removed)} by `{DEFAULT}`: {self.measured_on.line()}; chosen, mended and healed "
            f"on {self.learnt_on.line()}"
        )


def main(
    choices: Annotated[list[str], typer.Option(help="items of multiple choice")],
    text: Learnt,
    unseen: Annotated[str, typer.Option(help="to score on, and to begin texts with")],
    model: Model = Model(),
    remove: int = 4,
    tokens: int = 16384,
    scored: int = 4096,
    context: int = 256,
    items: int = 300,
    prompts: Annotated[int, typer.Option(help="texts of so many tokens begin")] = 16,
    steps: Annotated[int, typer.Option(help="tokens of each text")] = 48,
) -> None:
    loaded = model.load()
    learnt, judged, origins = two_texts(loaded, (text, tokens), (unseen, scored), context, context)
    begun = replace(judged, ids=judged.ids[:prompts, : context // 4])
    asked = lp.evaluation.load_tasks(choices)
    removed = lp.rank(loaded.model, learnt, criterion=DEFAULT).plan(remove).remove
    about = {"texts": encode(origins), "removed": removed, "items": items, "tasks": choices, "steps": steps}
    made_by = {"dense": lambda: loaded.model} | recovered(loaded.model, removed, learnt, STEPS)
    with Store(model.jobs / "beyond", "beyond perplexity", about) as store:
        for name, make in made_by.items():
            if name not in store:
                made = make()
                measured = State(
                    name,
                    lp.perplexity(made, judged, description=name).windows,
                    lp.evaluate_tasks({name: made}, loaded.tokenizer, asked, limit=items, batch_size=8),
                    None if made is loaded.model else compare_generation(loaded.model, made, begun, steps=steps),
                )
                store.add(name, encode(measured))
        states = [decode(State, store[name]) for name in STATES]
    plain = (replace(s, tasks=replace(s.tasks, tasks=plain_tasks(s.tasks.tasks))) for s in states)
    found = Costs(removed, tuple(plain), *origins)
    found.save(model.folder(HERE) / "costs.json")


def written(folder: Path = HERE) -> dict[str, str]:
    found = Costs.load(folder / "costs.json")
    cut, healed = found.states[1], found.states[-1]
    change = changed(*(together(found.accuracies(state)) for state in (healed, cut)))
    return {
        "setting": setting(found),
        "costs": costs(found),
        "text": texts(found),
        "healed-over-cut": ratio(healed.windows - cut.windows),
        "accuracy-over-cut": "{} ({} to {})".format(*map(points, change)),
    }


def setting(found: Costs) -> str:
    tasks = found.dense.tasks.tasks
    items = ", ".join(f"{task.name} {task.items} (chance {short(task.chance)})" for task in tasks)
    return bullets(found.headline(), f"tasks and items: {items}", f"healed: {STEPS} steps of one window, from mended")


def costs(found: Costs) -> str:
    """Perplexity over dense, and accuracies with their loss against dense, paired by item."""
    dense = found.accuracies(found.dense)
    rows: list[list[Any]] = []
    for state in found.states:
        own = found.accuracies(state)
        over = ratio(state.windows - found.dense.windows) if state is not found.dense else ratio(state.windows)
        everything = paired(together(own), together(dense), state is found.dense)
        cells = [paired(own[task], dense[task], state is found.dense) for task in dense]
        rows.append([state.name, over, *cells, everything])
    return table(["", "perplexity, of others / dense", *dense, "all items"], rows)


def together(accuracies: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate(list(accuracies.values()))


def paired(own: np.ndarray, dense: np.ndarray, alone: bool) -> str:
    """The accuracy in per cent; where it is not the dense model's own, the change in points, with its 95 % interval."""
    if alone:
        return percent(float(own.mean()))
    change, low, high = map(points, changed(own, dense))
    return f"{percent(float(own.mean()))}; {change} ({low} to {high})"


def points(share: float) -> str:
    return short(100 * share).replace("-", "−")


def changed(own: np.ndarray, dense: np.ndarray) -> tuple[float, float, float]:
    change = own - dense
    half = float(stats.norm.ppf(0.975) * stats.sem(change))
    return float(change.mean()), float(change.mean()) - half, float(change.mean()) + half


def texts(found: Costs) -> str:
    rows = []
    for state in found.states[1:]:
        assert state.text is not None
        share = state.text.kept
        half = stats.t.ppf(0.975, len(share) - 1) * stats.sem(share)
        repeated = [float(np.mean([repetition(t, NGRAM) for t in tokens])) for tokens in _tokens(state.text)]
        rows.append(
            [state.name, interval(*(100 * float(x) for x in (share.mean(), share.mean() - half, share.mean() + half)))]
            + [percent(x) for x in repeated]
            + [short(float(state.text.kl[0]))]
        )
    head = ["", "% of the dense text reproduced", f"{NGRAM}-grams repeated: dense", "this", "KL of the first token"]
    return table(head, rows)


def _tokens(text: GenerationDivergence) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return text.dense_tokens, text.compressed_tokens


if __name__ == "__main__":
    run_command(main, HERE / "costs.json", written)
