"""Perplexity of one model, or of two in one run, for the commands that score."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lyapunov_prune.cli.inputs import load_inputs, windows_at_once
from lyapunov_prune.cli.options import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.data.batch import TokenBatch
    from lyapunov_prune.evaluation.evaluation import Evaluation
    from lyapunov_prune.evaluation.perplexity import Perplexity
    from lyapunov_prune.models.decoder import Decoder


def scored(models: dict[str, PreTrainedModel], batch: TokenBatch, batch_size: int) -> Evaluation:
    """The perplexities of `models`, the reference first, their KL and sizes, and the zeros among their weights."""
    from lyapunov_prune.evaluation.evaluation import Evaluation, zero_share
    from lyapunov_prune.evaluation.perplexity import perplexity
    from lyapunov_prune.models.size import stored_size
    from lyapunov_prune.predictions.divergence import perplexities_and_kl

    perplexities: tuple[Perplexity, ...]
    dense, *others = models.values()
    if others:
        perplexities, kl = perplexities_and_kl(dense, others[0], batch, batch_size=batch_size)
    else:
        perplexities, kl = (perplexity(dense, batch, batch_size=batch_size),), None
    return Evaluation(
        perplexities=perplexities,
        zeros=tuple(zero_share(m) for m in models.values()),
        speed=None,
        sizes=tuple(size for name, m in models.items() if (size := stored_size(name, m)) is not None),
        kl=kl,
    )


def scored_pair(dense: str, smaller: str, inputs: Inputs) -> Evaluation:
    """Two models on the half of the text that nothing was chosen on, or of the built-in one if a model writes it."""
    from lyapunov_prune.data.sources import BUILTIN, SELF

    inputs = inputs.as_eval(inputs.context)
    inputs = replace(inputs, text=BUILTIN) if inputs.text == SELF else inputs
    first, batch = load_inputs(dense, inputs, "evaluation")
    return scored(by_name(first, [dense, smaller], inputs, batch), batch, windows_at_once(first, inputs.context))


def by_name(first: Decoder, names: list[str], inputs: Inputs, batch: TokenBatch) -> dict[str, PreTrainedModel]:
    """The models by name, none of which was made with the text of `batch`."""
    from lyapunov_prune.data.unseen import require_unseen
    from lyapunov_prune.models.gguf import gguf_file
    from lyapunov_prune.models.tokenizers import require_same_ids, require_same_tokenizer

    models = {names[0]: first.model}
    for name in names[1:]:
        other = inputs.load(name)
        both = (names[0], name)
        if any(map(gguf_file, both)):  # whose tokenizer may lack special tokens of the folder
            require_same_ids(first.tokenizer, other.tokenizer, both, first.structure.config.vocab_size)
        else:
            require_same_tokenizer(first.tokenizer, other.tokenizer, both)
        models[name] = other.model
    for model in models.values():
        require_unseen(model, batch)
    return models
