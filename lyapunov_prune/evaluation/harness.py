"""lm-evaluation-harness (extra `tasks`): the model adapter, tasks from files, and one run."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from typing import Any, TextIO

import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.data.batch import require_known
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.harness_tasks import SEED, quietly
from lyapunov_prune.forward.hooks import require_finite
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.hooked import hooked, overridden
from lyapunov_prune.models.positions import rotation, switches
from lyapunov_prune.models.streamed import require_not_streamed
from lyapunov_prune.models.structure import Structure, in_eval_mode
from lyapunov_prune.models.tokenizers import token_ids
from lyapunov_prune.progress import track

# Longer than any context: the harness would truncate on the left, and here such an item is refused.
_UNCUT = 2**31
# Requests per step of the progress bar.
_STRETCH = 16
# Bootstrap samples for metrics without a closed-form standard error.
_DRAWS = 1000


class ProjectModel(HFLM):
    """Adapter that lets lm-evaluation-harness score a loaded model.

    `bos` says whether texts begin with a BOS token; no other special token is added. Nothing is truncated: an item that
    does not fit the context is refused. Decoding is greedy and uses only the end-of-text tokens of the generation
    config. `read` holds the ids of every scored or continued text; `bars` is where progress is shown.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: Structure,
        tokenizer: PreTrainedTokenizerBase,
        *,
        bos: bool,
        batch_size: int,
        bars: TextIO,
    ) -> None:
        self._start = [tokenizer.bos_token_id] if bos else []
        self._context = structure.max_context or _UNCUT
        self._vocabulary = structure.config.vocab_size
        self._bars = bars
        self.read: list[list[int]] = []
        if switches(structure.config):  # padding would give a short text the positions of a long one
            batch_size = 1
        # A copy: the harness gives a tokenizer without a padding token one.
        super().__init__(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size, max_length=_UNCUT)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = token_ids(self.tokenizer, string)
        return ids if add_special_tokens is False else [*self._start, *ids]

    def tok_batch_encode(
        self, strings: Sequence[str], padding_side: str = "left", left_truncate_len: int | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.tok_encode(string) for string in strings]
        if left_truncate_len:
            self._require(rows, room=_UNCUT - left_truncate_len)
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        rows = [[*context, *continuation] for _, context, continuation in requests]
        self._require(rows)
        self.read += rows
        with redirect_stderr(self._bars):
            log_likelihoods: list[tuple[float, bool]] = []
            width = _STRETCH * self.batch_size
            for start in track(range(0, len(requests), width), "log-likelihoods"):
                some = requests[start : start + width]
                log_likelihoods += super()._loglikelihood_tokens(some, disable_tqdm=True, override_bs=override_bs)
        return log_likelihoods

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        rows = [self.tok_encode(request.args[0]) for request in requests]
        self._require(rows)
        self.read += rows
        if self.tokenizer.eos_token_id is None:
            raise LyapunovPruneError("this tokenizer has no end-of-text token, which generation stops at; give it one")
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # the longest first, to fail early
        texts: dict[int, str] = {}
        with redirect_stderr(self._bars):
            for start in track(range(0, len(order), self.batch_size), "answers"):
                some = order[start : start + self.batch_size]
                answers = super().generate_until([requests[i] for i in some], disable_tqdm=True)
                texts.update(zip(some, answers, strict=True))
        return [texts[i] for i in range(len(rows))]

    def _require(self, rows: Sequence[Sequence[int]], room: int = 0) -> None:
        longest = max(map(len, rows))
        if longest + room > self._context:
            words = f" and {room} to write" if room else ""
            raise LyapunovPruneError(
                f"an item of {longest} tokens{words} does not fit the model's context of {self._context}; "
                "leave it out, or give fewer examples (--few-shot)"
            )
        require_known(min(map(min, rows)), max(map(max, rows)), self._vocabulary)


@in_eval_mode
def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Mapping[str, ConfigurableTask],
    *,
    limit: int | None,
    bos: bool,
    batch_size: int,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Run `evaluate` of the harness; returns its results and the ids of every scored or continued text.

    The model, its generation config, the tokenizer and the random states are restored. Raises NonFiniteError naming the
    layer when logits are not finite, and LyapunovPruneError for an item that does not fit the context.
    """
    require_not_streamed(model)
    structure = wrap(model).structure
    for task in tasks.values():
        task.set_fewshot_seed(SEED)  # the same examples for every model
    shown = sys.stderr  # `quietly` lets only the bars through
    with quietly(), _only_finite(model, structure), _greedy(model), _fresh_cache(model, structure.config):
        asked = ProjectModel(model, structure, tokenizer, bos=bos, batch_size=batch_size, bars=shown)
        # simple_evaluate would seed every generator and look the model up on the hub.
        harness_results = evaluate(asked, dict(tasks), limit=limit, bootstrap_iters=_DRAWS, log_samples=True)
    return harness_results, asked.read


def _only_finite(model: PreTrainedModel, structure: Structure) -> AbstractContextManager[None]:
    """Raise on logits that are not finite, because the harness would take the argmax of NaN for an answer."""

    def check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        require_finite(structure, args[0] if args else kwargs["input_ids"], "an item", output.logits)

    return hooked(after=[(model, check)])


@contextmanager
def _greedy(model: PreTrainedModel) -> Iterator[None]:
    """Turn off repetition penalties of the generation config, which would hide a collapse."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=getattr(kept, "eos_token_id", None))
    try:
        yield
    finally:
        model.generation_config = kept


def _fresh_cache(model: Any, config: Any) -> AbstractContextManager[None]:
    """Let `generate` drop a cache made stale by length-dependent positions; transformers only does so for Phi-3."""
    prepare = model.prepare_inputs_for_generation

    def prepared(input_ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> dict[str, Any]:
        read = 0 if past_key_values is None else past_key_values.get_seq_length()
        if read and rotation(config, read) != rotation(config, input_ids.shape[1]):
            past_key_values, kwargs["next_sequence_length"] = None, None
        return prepare(input_ids, past_key_values=past_key_values, **kwargs)

    return overridden(model, prepared, "prepare_inputs_for_generation") if switches(config) else nullcontext()
