"""Multiple choice: how a compression changes the scores of the options and the whole prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.arguments import SOME, Count
from lyapunov_prune.bounds.decision import argmax_unchanged_of_row_difference, argmax_unchanged_of_state_error
from lyapunov_prune.data.batch import checked_batch, rows_measured_on
from lyapunov_prune.data.choices import ChoiceItem, tokenize
from lyapunov_prune.data.text import adds_bos
from lyapunov_prune.data.unseen import require_unseen_items
from lyapunov_prune.forward.hooks import final_state, require_finite
from lyapunov_prune.forward.reading import read
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.linalg import lift, require_numbers
from lyapunov_prune.models.decoder import InMemory, runs_models
from lyapunov_prune.models.positions import alike, rotation
from lyapunov_prune.models.structure import Structure, find_structure
from lyapunov_prune.predictions.choice_comparison import ChoiceComparison
from lyapunov_prune.predictions.spaces import kl_divergence, turn
from lyapunov_prune.progress import track


def fitting(
    items: Sequence[ChoiceItem],
    tokenizer: PreTrainedTokenizerBase,
    models: Sequence[PreTrainedModel],
    limit: int | None,
) -> list[tuple[torch.Tensor, list[int], int]]:
    """Tokenize the first `limit` items. Raises LyapunovPruneError like `compare_choices`, before any forward."""
    items = items[:limit]
    for model in models:
        strings = [(item.query, *item.choices, item.stem + item.choices[item.gold]) for item in items]
        require_unseen_items(model, tokenizer, strings, "the file")
    tokenized = [tokenize(item, tokenizer) for item in items]
    for structure in map(find_structure, models):
        for ids, _, _ in tokenized:
            checked_batch(structure, ids)
    return tokenized


@runs_models
def compare_choices(
    dense: InMemory,
    compressed: InMemory,
    items: Annotated[Sequence[ChoiceItem], SOME],
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: Count | None = None,
) -> ChoiceComparison:
    """Score the choices of the first `limit` items (default: all) with both models, see ChoiceComparison.

    A choice follows its query after one space, or directly where the query ends in white space. The tokens that all
    choices of an item share are its context, after a BOS token if the tokenizer adds one. Cost: two forwards per item
    with all its choices in one batch (more if position encodings depend on the length); at most 64 positions of logits
    in memory. Log-likelihoods are in float64.

    Raises NonFiniteError naming the layer when a model is not finite, and LyapunovPruneError when there are no items,
    when a recorded step of a model has seen one of them, when two choices have the same tokens, when one is longer than
    the context, or when the tokenizer does not match the vocabulary.
    """
    models = (dense.model, compressed.model)
    items = items[:limit]
    tokenized = fitting(items, tokenizer, models, limit)
    readings = [read(decoder, tokenized[0][0]) for decoder in (dense, compressed)]
    scorers = [reading.scorer for reading in readings]
    provable = scorers[0].reads_as(scorers[1])  # the theorem assumes one linear head
    likelihoods: tuple[list[tuple[float, ...]], list[tuple[float, ...]]] = ([], [])
    rows: list[list[float]] = []
    for ids, lengths, context in track(tokenized, "multiple choice"):
        firsts = ids[:, context].unique()
        states, masses, tops, logits = [], [], [], []
        for model, scorer, of_model in zip(models, scorers, likelihoods, strict=True):
            beginning, read_from = _states(scorer.structure, ids.to(model.device), lengths, context)
            of_model.append(_likelihoods(scorer, torch.cat(read_from), ids, lengths, context))
            z = lift(scorer.logits(beginning)).cpu()[0]
            states.append(beginning)
            masses.append(float(z.log_softmax(-1)[firsts].exp().sum()))
            tops.append(int(z.argmax()))
            logits.append(z)
        proof = [float("nan")] * 4
        if provable and len(firsts) > 1:
            head: Any = scorers[0].head
            bias = None if head.bias is None else head.bias[firsts.to(head.bias.device)]
            given = (states[0], states[1], head.weight[firsts.to(head.weight.device)], bias)
            one, norms = argmax_unchanged_of_row_difference(*given), argmax_unchanged_of_state_error(*given)
            proof = [float(x[0]) for x in (one.radius, norms.radius, one.moved, one.changed)]
        rows.append([*masses, float(tops[0] == tops[1]), *_moved(logits[0], logits[1], firsts), *proof])
    columns = np.array(rows).T
    read_rows = [row[:n].tolist() for ids, lengths, _ in tokenized for row, n in zip(ids, lengths, strict=True)]
    return ChoiceComparison(
        dense=tuple(likelihoods[0]),
        compressed=tuple(likelihoods[1]),
        characters=tuple(tuple(float(len(choice)) for choice in item.choices) for item in items),
        gold=tuple(item.gold for item in items),
        dense_mass=columns[0],
        compressed_mass=columns[1],
        same_top=columns[2] > 0,
        options_logit=columns[3],
        options_probability=columns[4],
        options_kl=columns[5],
        kl=columns[6],
        radius=columns[7],
        radius_of_norms=columns[8],
        moved=columns[9],
        changed=columns[10],
        compressed_model=compressed.identity,
        measured_on=rows_measured_on(dense.model, read_rows, f"{len(tokenized)} items", bos=adds_bos(tokenizer)),
    )


def _states(
    structure: Structure, ids: torch.Tensor, lengths: list[int], context: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The state after the shared context (1 × width), and the states that predict the tokens of each choice.

    The last token of a choice predicts nothing and is left out. Choices are batched only where they have the same
    position encoding (`models.positions`); otherwise the shared context is read by itself.
    """
    read = [length - 1 for length in lengths]
    found: dict[int, torch.Tensor] = {}
    for places in alike(structure.config, read):
        some = final_state(structure, ids[places, : max(read[i] for i in places)])
        found |= {i: state[context - 1 : read[i]] for i, state in zip(places, some, strict=True)}
    rotated = {rotation(structure.config, length) for length in (context, *read)}
    beginning = found[0][:1] if len(rotated) == 1 else final_state(structure, ids[:1, :context])[0, -1:]
    states = [found[i] for i in range(len(lengths))]
    require_finite(structure, ids, "an item", beginning, *states)
    return beginning, states


def _likelihoods(
    scorer: Scorer, states: torch.Tensor, ids: torch.Tensor, lengths: list[int], context: int
) -> tuple[float, ...]:
    """`Σ log p` of the tokens of every choice, float64; each row of `states` predicts one token."""
    counts = [length - context for length in lengths]
    wanted = torch.cat([row[context:length] for row, length in zip(ids, lengths, strict=True)])
    each = torch.cat(
        [
            lift(scorer.logits(rows)).cpu().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            for rows, tokens in scorer.split(states, wanted)
        ]
    )
    require_numbers(each, "log-likelihoods of tokens")
    return tuple(float(part.sum()) for part in each.split(counts))


def _moved(z: torch.Tensor, z2: torch.Tensor, options: torch.Tensor) -> list[float]:
    """`options_logit`, `options_probability`, `options_kl` and `kl` of two rows of logits, float64."""
    among = [float("nan")] * 3
    if len(options) > 1:
        a, b = z[options][None], z2[options][None]
        log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
        among = [float(x) for x in (turn(a, b)[0], turn(log_p.exp(), log_q.exp())[0], kl_divergence(log_p, log_q))]
    if z.shape != z2.shape:
        return [*among, float("nan")]
    return [*among, float(kl_divergence(z.log_softmax(-1), z2.log_softmax(-1)))]
