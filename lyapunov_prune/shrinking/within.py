"""How many layers can be removed while the loss stays within a target: a divergence, or a drop of a task's score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.errors import CheckFailed
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.evaluation.perplexity import ratio_of
from lyapunov_prune.evaluation.sizes import SizesTried
from lyapunov_prune.evaluation.tasks import Task, evaluate_tasks
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.mending.mend import Mend, mapped
from lyapunov_prune.models.plain import plain
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.predictions.divergence import divergences_of
from lyapunov_prune.pruning.surgery import Operation, cut
from lyapunov_prune.ranking.counts import most_not_over, nothing_within
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.worth import Ratio
from lyapunov_prune.shrinking.choosing import Chooser, Chosen
from lyapunov_prune.shrinking.cost import smaller_bytes
from lyapunov_prune.shrinking.report import main_score
from lyapunov_prune.shrinking.target import Target

# The loss that a choice of layers causes.
Loss = Callable[[Chosen], float]


def largest(target: Target, chooser: Chooser, lost: Loss) -> tuple[Chosen, float]:
    """The largest choice of layers whose loss stays within `target`, and that loss.

    Layers are chosen and mended anew for every number that is tried. Raises LyapunovPruneError, with the loss, if a
    single layer already loses more.
    """
    most = chooser.reading.structure.num_layers - 1
    tried: dict[int, tuple[Chosen, float]] = {}

    def is_over(count: int) -> bool:
        choice = chooser.choose(count)
        tried[count] = choice, lost(choice)
        return not tried[count][1] <= target.value  # NaN counts as over the target

    count = most_not_over(is_over, most)
    if count == 0:
        choice, loss = tried[1]
        if target.by == "gentle":
            raise CheckFailed(
                f"removing no layer costs {target.told()} (layer {choice.plan.remove[0]}: up to × {loss:.3g}); give "
                "--remove to take some anyway, or end --output in .gguf, to round the matrices instead"
            )
        raise nothing_within("layer", target.told(), f"layer {choice.plan.remove[0]}", loss)
    return tried[count]


@in_eval_mode
def divergence(model: PreTrainedModel, chooser: Chooser, choice: Chosen) -> float:
    """KL(dense ‖ pruned and mended) in nats per token, on the windows that no score or map has seen."""
    _, checking = apart(chooser.reading, of=2, most=None)
    removed = choice.plan.remove
    first = min([*removed, *(mend.place.layer for mend in choice.mends)])
    change = partial(_without, checking, removed, choice.mends)
    return float(divergences_of(checking, [(first, change)], 1.0, chooser.batch_size, "divergence")[0, 1])


@contextmanager
def _without(reading: Reading, removed: Sequence[int], mends: Sequence[Mend]) -> Iterator[None]:
    with reading.prefix.without(removed), mapped(reading.structure.layers, mends):
        yield


class Worsening:
    """The loss of a choice as the upper end of its ratio of perplexities on the windows that check; `rows` has all."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.rows: list[tuple[str, int, Ratio]] = []
        self._on: MeasuredOn | None = None

    def __call__(self, choice: Chosen) -> float:
        found, report = choice.found, choice.report
        losses = found.tried[found.chosen].windows
        if choice.mends and report is not None and report.check is not None:
            losses = report.check.after
        ratio = ratio_of(losses - found.dense)
        remove = len(choice.plan.remove)
        self.rows.append((f"without {remove} layers", smaller_bytes(self._model, remove), ratio))
        self._on = found.checked_on
        return ratio.high

    def tried(self) -> SizesTried | None:
        """All that were tried; None if none was."""
        return None if self._on is None else SizesTried.of(self.rows, self._on)


def drop_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, batch_size: int) -> Loss:
    """The loss as the drop of the score of `task`; the dense model answers once."""

    def score(scored: PreTrainedModel) -> float:
        result = evaluate_tasks({"model": scored}, tokenizer, [task], batch_size=batch_size)
        return main_score(list(result.scores)).value

    dense = score(model)
    decoder = plain(model)

    def loss(choice: Chosen) -> float:
        return dense - score(cut(decoder, Operation(choice.plan, mends=choice.mends), shared=True).model)

    return loss
