"""One recovery: train an unmerged student for some steps to predict what the dense model predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lyapunov_prune.data.examples import Examples
from lyapunov_prune.errors import named
from lyapunov_prune.healing.distillation import Distillation, update_sizes
from lyapunov_prune.healing.heal import LOW_RANK_RATE, RATE
from lyapunov_prune.healing.rounds import schedule
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import trained
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.progress import track


@dataclass(frozen=True)
class RecoveryRecipe:
    """What all recoveries of a run share: each step uses `batch` items.

    Without `rank` all parameters of the layers are trained. `learning_rate` is the same for every parameter; without it
    the rate is the relative update size with which `heal` starts (`update_sizes`), because no constant suits two
    models.
    """

    batch: int = 1
    rank: int | None = None
    learning_rate: float | None = None
    temperature: float = 1.0
    optimizer: str = "adamw"

    @property
    def rate(self) -> float:
        return self.learning_rate or (RATE if self.rank is None else LOW_RANK_RATE)


@dataclass(frozen=True)
class Lesson:
    """One training task: which layers lose their attention and activation, which items, and the seed."""

    name: str
    attention: tuple[int, ...]
    activation: tuple[int, ...]
    items: tuple[int, ...]
    seed: int


def recover(
    student: Unmerged | PreTrainedModel,
    teacher: PreTrainedModel,
    examples: Examples,
    lesson: Lesson,
    recipe: RecoveryRecipe,
    state: TrainingState,
    watch: Callable[[int], None] | None = None,
) -> list[float]:
    """Train the weights of `student` in place to predict what `teacher` predicts, one step per batch of the lesson.

    An Unmerged student is trained without the parts that the lesson names, and stays unmerged: they are only removed
    inside `Unmerged.cut`. A plain model is trained as it is. Returns the loss before each step.

    A checkpoint of the training state is kept in `state` about every 20 seconds, and at the end the trained weights
    alone. An interrupted run continues from it and ends bit for bit as if it had not been interrupted, on the CPU with
    the same number of threads. `watch` is called after every step of this run with the number of steps taken.

    Raises LyapunovPruneError naming the lesson and the step for a loss or gradient that is not finite.
    """
    cut = student.cut(lesson.attention, lesson.activation) if isinstance(student, Unmerged) else nullcontext(student)
    with cut as model, trained(model, recipe.rank, lesson.seed) as parameters:
        steps = len(lesson.items) // recipe.batch
        sizes = update_sizes(model, parameters) if recipe.learning_rate is None else None
        run = Distillation(model, teacher, parameters, recipe.temperature, optimizer=recipe.optimizer, sizes=sizes)
        if tensors := state.load():
            run.go_on_from(tensors.items())
        for step in track(range(run.step, steps), f"recovery of {lesson.name}"):
            items = lesson.items[step * recipe.batch : (step + 1) * recipe.batch]
            with named(lesson.name):
                run.take_step(stacked(examples, items), recipe.rate * schedule(step, steps))
            if watch is not None:
                watch(run.step)
            if run.step < steps and state.is_due():
                state.save(run.step, run.tensors())
        state.save(steps, learnt(run.tensors()))
    return run.losses


def stacked(examples: Examples, items: Sequence[int]) -> torch.Tensor:
    """These items as one input of a model."""
    return torch.stack([examples.item(i) for i in items])


def learnt(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trained weights within a saved state."""
    return {name: t for name, t in tensors.items() if name == "losses" or name.startswith("parameter/")}


@torch.no_grad()
def inherit(student: Unmerged, lesson: Lesson, recipe: RecoveryRecipe, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the trained weights of a lesson into `student`; `tensors` are its last state.

    With low rank, the earlier lessons must have been loaded before, in order.
    """
    cut = student.cut(lesson.attention, lesson.activation)
    with cut as model, trained(model, recipe.rank, lesson.seed) as parameters:
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"parameter/{name}"])
