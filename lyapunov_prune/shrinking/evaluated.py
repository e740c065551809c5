"""What `shrink` measures of the dense and of the smaller model, on text that no step saw."""

from __future__ import annotations

from transformers import PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.evaluation.evaluation import Evaluation, zero_share
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
from lyapunov_prune.evaluation.speed import measure_speed, prompt_for
from lyapunov_prune.evaluation.tasks import Task, evaluate_tasks
from lyapunov_prune.models.size import model_size
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.predictions.divergence import perplexities_and_kl
from lyapunov_prune.shrinking.request import Request


def evaluated(request: Request, smaller: PreTrainedModel, held_out: TokenBatch, task: Task | None) -> Evaluation:
    dense, batch_size = request.model, request.batch_size
    models = {"dense": dense, "smaller": smaller}
    both, kl = perplexities_and_kl(dense, smaller, held_out, batch_size=batch_size)
    return Evaluation(
        perplexities=both,
        zeros=tuple(map(zero_share, models.values())),
        sizes=tuple(map(model_size, models.values())),
        kl=kl,
        speed=measure_speed(models, prompt=prompt_for(find_structure(dense)), steps=16, repeats=5),
        tasks=None if task is None else evaluate_tasks(models, request.tokenizer, [task], batch_size=batch_size),
    )


def both_perplexities(request: Request, smaller: PreTrainedModel, text: TokenBatch) -> tuple[Perplexity, Perplexity]:
    """Of the dense and of the smaller model."""
    dense, small = (perplexity(m, text, batch_size=request.batch_size) for m in (request.model, smaller))
    return dense, small
