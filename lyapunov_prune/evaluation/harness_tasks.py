"""Tasks of lm-evaluation-harness: from files, and from the hub by name."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import datasets
import transformers
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from lyapunov_prune.data.choices import TaskFile
from lyapunov_prune.errors import LyapunovPruneError, reported

# Seed for the few-shot examples of the harness.
SEED = 1234
# Longest answer and stop strings, as in the harness' gsm8k.
ANSWER = 256
_UNTIL = ("Question:", "</s>", "<|im_end|>")
_MULTIPLE_CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "query",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "target_delimiter": "",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
# A blank filled in several ways, followed by the same words, as in the harness' winogrande.
_PARTIAL: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "gold",
    "doc_to_choice": "context_options",
    "doc_to_target": "continuation",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
_GENERATION: dict[str, Any] = {  # the harness' gsm8k, version 3, apart from its data
    "output_type": "generate_until",
    "doc_to_text": lambda item: f"Question: {item['question']}\nAnswer:",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": list(_UNTIL), "do_sample": False, "temperature": 0.0, "max_gen_toks": ANSWER},
    "metric_list": [
        {
            "metric": "exact_match",
            "aggregation": "mean",
            "higher_is_better": True,
            "ignore_case": True,
            "ignore_punctuation": False,
            "regexes_to_ignore": [",", r"\$", "(?s).*#### ", r"\.$"],
        }
    ],
    "filter_list": [
        {
            "name": "strict-match",
            "filter": [{"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"}, {"function": "take_first"}],
        },
        {
            "name": "flexible-extract",
            "filter": [
                {"function": "regex", "group_select": -1, "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)"},
                {"function": "take_first"},
            ],
        },
    ],
}


def local_task(file: TaskFile, few_shot: int) -> ConfigurableTask:
    """A task of the harness from the items of `file`; the first `few_shot` items are examples and are not scored."""
    examples, items = file.items[:few_shot], file.items[few_shot:]
    if not items:
        raise LyapunovPruneError(f"{file.path} has {len(file.items)} items, and {few_shot} are examples; give fewer")
    forms = {"multiple choice": _MULTIPLE_CHOICE, "partial": _PARTIAL, "generation": _GENERATION}
    config = {
        **forms[file.kind],
        "task": file.path.stem,
        # The JSON loader of datasets would leave a copy of every file in a cache.
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(list(items))},
        "test_split": "test",
        "num_fewshot": few_shot,
        "fewshot_config": {"sampler": "first_n", "samples": list(examples)},
    }
    with quietly():
        return ConfigurableTask(config=copy.deepcopy(config))


def hub_tasks(names: Sequence[str], few_shot: int | None) -> dict[str, ConfigurableTask]:
    """Tasks of the harness by name; a group stands for its tasks. Their items are downloaded from the hub.

    Raises LyapunovPruneError for an unknown name and a download that fails.
    """
    manager = TaskManager()
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise LyapunovPruneError(
            f"{unknown[0]} is neither a .jsonl file nor a task of lm-evaluation-harness; `lm-eval ls tasks` lists those"
        )
    remedy = "check the network, or give .jsonl files of items"
    with reported(f"cannot load {', '.join(names)} from the hub", remedy, Exception), quietly():
        tasks = manager.load(list(names))["tasks"]
    for task in tasks.values():
        if few_shot is not None:
            task.set_config(key="num_fewshot", value=few_shot)
    return tasks


def every_second(task: ConfigurableTask, first: int) -> ConfigurableTask:
    """A copy of `task` with every second of its items, from number `first` on."""
    split = task.config.test_split or task.config.validation_split
    rows = task.dataset[split]
    part = copy.copy(task)
    part.dataset = {**task.dataset, split: rows.select(range(first, len(rows), 2))}
    part.task_docs = part.eval_docs
    return part


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress logs, bars and prints of the harness and its dependencies."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    verbosity = transformers.logging.get_verbosity()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        transformers.logging.set_verbosity_error()
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
