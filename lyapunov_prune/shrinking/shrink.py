"""From a model to a smaller one in one call: the order of the steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.arguments import Amount, Count, Positive, Seed, checked
from lyapunov_prune.budget.alone import rounded_alone
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.evaluation.sizes import SizesTried
from lyapunov_prune.evaluation.tasks import Task, halves
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import Model, in_memory, model_of
from lyapunov_prune.models.launched import from_each
from lyapunov_prune.models.plain import plain
from lyapunov_prune.models.size import model_size
from lyapunov_prune.models.structure import identify, in_eval_mode, model_name
from lyapunov_prune.models.wrappers import loading_class
from lyapunov_prune.progress import is_main
from lyapunov_prune.pruning.removal import check_removal
from lyapunov_prune.pruning.surgery import Operation, cut
from lyapunov_prune.results.files import require_disk
from lyapunov_prune.results.store import Store
from lyapunov_prune.shrinking.choosing import Chooser, Chosen
from lyapunov_prune.shrinking.cost import Estimate
from lyapunov_prune.shrinking.evaluated import both_perplexities, evaluated
from lyapunov_prune.shrinking.healing import healed_from, words_of
from lyapunov_prune.shrinking.report import Shrinking, Shrunk
from lyapunov_prune.shrinking.request import Clock, Request, healing_minutes, search_forwards
from lyapunov_prune.shrinking.target import Target
from lyapunov_prune.shrinking.texts import CONTEXT, TOKENS, Texts, foreign_text
from lyapunov_prune.shrinking.within import Loss, Worsening, divergence, drop_of, largest
from lyapunov_prune.shrinking.written import by_hand, is_gguf, require_output, write_shrunk, write_shrunk_gguf


@checked
def shrink(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    output: str | Path | None = None,
    *,
    remove: Amount | None = None,
    max_kl: Positive | None = None,
    max_drop: str | None = None,
    minutes: Positive | None = None,
    batch: TokenBatch | None = None,
    judge: TokenBatch | None = None,
    evaluation: TokenBatch | None = None,
    tokens: int = TOKENS,
    context: int = CONTEXT,
    seed: Seed = 0,
    batch_size: Count = 1,
    folder: str | Path | None = None,
) -> Shrunk:
    """A smaller model made from `model`, which stays untouched, and a report; written to `output` if that is given.

    One target says how much goes, and without one as many layers go as cost less than 10 % more perplexity: `remove`
    layers (a float below 1: a share of them), or the most that keep KL(dense ‖ pruned) within `max_kl` nats a token, on
    windows that no step learns from, or that let the score of a task fall by no more than `max_drop` says, as
    `gsm8k:0.02`, by name or by file as `evaluation.load_tasks` takes them: every second item chooses, the others are
    reported. Multiple choice hides what arithmetic loses; a task with generated answers shows it.

    Layers are chosen by criterion `best` (`ranking.best`), their gaps mended (`mending`), the result healed from
    `model` (`healing`). Mending and healing are kept only where windows that they did not learn from say that they pay,
    and nothing is written that fails the gate. `minutes` bounds the whole run: a step for which no time is left is
    skipped, and the report says so. Without it healing takes STEPS steps.

    `batch` teaches every step; None has the model write `tokens` tokens in windows of `context` to heal by, and longer
    windows to choose layers and mend by. `judge` is a second
    text that judges mending, `evaluation` one that no step sees; the built-in text if None (`Texts.filled`). A text of
    another kind than those is scored beside it (`texts.foreign_text`). What was measured is kept in `folder` and not
    measured again, by a later run of other `minutes` or another number of layers either; what is decided and trained,
    until the smaller model is written.

    An `output` that ends in .gguf is the GGUF file that `model` was read from without the layers, copied byte for byte
    but for the tensors that changed; they keep their type.

    Raises LyapunovPruneError for two targets, for one that cannot be met, with how near it comes, for texts too
    short to judge by or that share tokens, for minutes in which no layers can be chosen, an `output` that is not empty,
    and too little memory or disk; and as `best_removal` and `heal`. Raises CheckFailed when the gate fails.
    """
    model = model_of(model)
    place = None if folder is None else Path(folder)
    texts = Texts(batch, judge, evaluation, tokens, context)
    target = Target.of(remove, max_kl, max_drop)
    request = Request(
        model,
        tokenizer,
        target,
        texts,
        items=None if target.task is None else halves(target.task),
        minutes=minutes,
        seed=seed,
        batch_size=batch_size,
        folder=place,
    )
    return carry_out(request, None if output is None else Path(output))


def carry_out(request: Request, output: Path | None, told: Callable[[Estimate], Any] = lambda _: None) -> Shrunk:
    """`shrink` as requested; `told` is called with the estimate before anything is written."""
    if output is not None:
        require_output(model_name(request.model), output)
    request.require()
    texts = request.texts
    about = {"model": identify(request.model).key, "target": request.target.option(), "seed": request.seed}
    about |= {"text": "self" if texts.learn is None else texts.learn.text_hash}
    about |= {"choose": None if texts.choose is None else texts.choose.text_hash}
    about |= {"search": request.search, "steps": request.steps}
    about |= {"tokens": texts.tokens, "context": texts.context, "minutes": request.minutes}
    with Store(request.folder if is_main() else None, "shrinking", about, alone=True) as store:
        store.learn(from_each(request.model, store.items())[0])  # every process decides as the first did
        done = in_eval_mode(_run)(request.model, request, output, told, Clock(request.minutes, store))
        store.forget()
    return done


def _run(
    model: PreTrainedModel, request: Request, output: Path | None, told: Callable[[Estimate], Any], clock: Clock
) -> Shrunk:
    items = request.items
    remove = clock.once("remove", request.count)
    expected = from_each(model, request.estimate(remove))[0]
    for folder in (output, request.folder):
        if folder is not None:
            require_disk(folder, expected.disk, "the smaller model and the state of its healing")
    search = clock.once("search", lambda: request.search or from_each(model, search_forwards(expected, clock))[0])
    told(expected)
    choose, learn, judge, held_out = request.texts.filled(model, request.tokenizer, request.folder)
    chooser = Chooser(
        read(in_memory(model), choose),
        judge,
        search=search,
        folder=request.folder,
        batch_size=request.batch_size,
    )
    choice, tried = _chosen(request, chooser, remove, None if items is None else items[0])
    decoder, operation = plain(model), Operation(choice.plan, mends=choice.mends)
    made = cut(decoder, operation, shared=True)
    pruned, gate = made.model, check_removal(decoder, made, operation, learn)
    gate.require_passed()
    minutes = clock.once("healing", lambda: from_each(model, healing_minutes(expected, clock))[0])
    healed, healing = healed_from(request, pruned, learn, expected, minutes, clock.store.place)
    smaller = pruned if healed is None else healed.model
    require_unseen(smaller, held_out)
    foreign = foreign_text(smaller, request.tokenizer, (choose, learn, judge, held_out), held_out)
    evaluation = evaluated(request, smaller, held_out, None if items is None else items[1])
    heals = None if healed is None else words_of(request, expected, minutes)
    place = None if output is None else str(output)
    output = output if is_main() else None
    commands = by_hand(request, choice, heals, (choose, learn, held_out, foreign), place or "OUT")
    report = Shrinking(
        target=request.target.told(),
        plan=choice.plan,
        steps=(*choice.taken, healing),
        size=(model_size(model).bytes, model_size(smaller).bytes),
        evaluation=evaluation,
        foreign=() if foreign is None else both_perplexities(request, smaller, foreign),
        learnt_on=learn.measured_on(model),
        judged_on=judge.measured_on(model),
        commands=commands,
        loader=loading_class(smaller).__name__,
        folder=place,
        tried=tried,
        alone=rounded_alone(decoder, smaller.num_parameters(), output or Path(), choose),
    )
    if output is not None and is_gguf(output):
        report = replace(report, size=write_shrunk_gguf(request, smaller, choice, gate, report, output))
    elif output is not None:
        healing_report = None if healed is None else healed.report
        write_shrunk(request, smaller, choice, gate, report, output, healing=healing_report, batch=learn)
    if healed is None:  # what it shares with the dense model is the caller's to change
        smaller = copy.deepcopy(smaller)
    return Shrunk(smaller, report)


def _chosen(
    request: Request, chooser: Chooser, remove: int | None, task: Task | None
) -> tuple[Chosen, SizesTried | None]:
    """The layers to remove, as many as asked, or as the target allows to lose; and what was tried if none is given."""
    if remove is not None:
        return chooser.choose(remove), None
    lost: Loss = partial(divergence, request.model, chooser)
    unit, worsening = "nats a token", Worsening(request.model)
    if task is not None:
        lost, unit = (
            drop_of(request.model, request.tokenizer, task, request.batch_size),
            f"lost in the score of {task.name}",
        )
    elif request.target.by == "gentle":
        lost, unit = worsening, "times the perplexity at the most"
    choice, loss = largest(request.target, chooser, lost)
    first = choice.taken[0]
    told = f"{first.told}; {loss:.3g} {unit}, used to choose"
    return replace(choice, taken=(replace(first, told=told), *choice.taken[1:])), worsening.tried()
