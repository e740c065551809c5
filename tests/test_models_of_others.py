"""Models that the user loaded, wraps and trains: what the public functions make of them, and leave as it was."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers import make_tiny, make_tokenizer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline

import lyapunov_prune as lp
from lyapunov_prune.shrinking import healing
from lyapunov_prune.shrinking import shrink as shrinking

IDS = torch.randint(0, 97, (8, 12), generator=torch.Generator().manual_seed(0))


def refused(model: PreTrainedModel) -> None:
    with pytest.raises(lp.LyapunovPruneError, match="outside the model's vocabulary"):
        lp.perplexity(model, IDS + 10**6)


def shrunk(model: PreTrainedModel, folder: Path) -> None:
    windows = torch.randint(0, 97, (56, 24), generator=torch.Generator().manual_seed(1))
    learn, judge, unseen = (lp.TokenBatch(part, "ids", "all", False) for part in windows.split((32, 8, 16)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(healing, "STEPS", 2)
        patch.setattr(shrinking, "foreign_text", lambda *_: None)  # it has other ids than this model
        out = folder / "shrunk"
        lp.shrink(model, make_tokenizer(), out, remove=1, batch=learn, judge=judge, evaluation=unseen)


# What is called, with a model and a folder to write to.
CALLS: dict[str, Callable[[PreTrainedModel, Path], Any]] = {
    "measure_contraction": lambda model, folder: lp.measure_contraction(model, IDS, seeds=range(2)),
    "block_influence": lambda model, folder: lp.block_influence(model, IDS),
    "rank bi": lambda model, folder: lp.rank(model, IDS, criterion="bi"),
    "rank best": lambda model, folder: lp.rank(model, IDS, criterion="best", remove=1),
    "perplexity": lambda model, folder: lp.perplexity(model, IDS),
    "remove_layers": lambda model, folder: lp.remove_layers(model, lp.PruningPlan.given(model, [1])),
    "verify_removal": lambda model, folder: lp.verify_removal(model, lp.remove_layers(model, [1]), [1], IDS),
    "compress": lambda model, folder: lp.compress(model, IDS, method="wanda", sparsity=0.5),
    "check_bounds": lambda model, folder: lp.check_bounds(model, IDS, sparsity=0.5),
    "measure_sensitivity": lambda model, folder: lp.measure_sensitivity(model, IDS, studies=("removal",)),
    "probe_layers": lambda model, folder: lp.probe_layers(model, IDS, steps=2),
    "compare_generation": lambda model, folder: lp.compare_generation(
        model, lp.remove_layers(model, [1]), IDS, steps=2
    ),
    "heal": lambda model, folder: lp.heal(lp.remove_layers(model, [1]), model, IDS.repeat(2, 1), steps=2),
    "shrink": shrunk,
    "save": lambda model, folder: lp.save(lp.remove_layers(model, [1]), make_tokenizer(), folder / "small"),
    "refusal": lambda model, folder: refused(model),
}


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """What a call could leave behind: settings of libraries, random states, and everything about the model."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": str(np.random.get_state()),
        "random": random.getstate(),
        "numpy errors": np.geterr(),
        "warnings": list(warnings.filters),
        "log level": logging.getLogger().level,
        "transformers log level": transformers.logging.get_verbosity(),
        "transformers bars": transformers.logging.is_progress_bar_enabled(),
        "training": [module.training for module in model.modules()],
        "hooks": [len(vars(module)[name]) for module in model.modules() for name in hooks],
        "needs gradient": [p.requires_grad for p in model.parameters()],
        "gradients kept": [p.grad is None for p in model.parameters()],
        "weights": [p.detach().clone().numpy().tobytes() for p in model.parameters()],
        "config": model.config.to_json_string(),
        "forward": "forward" in vars(model),
    }


CALLED: set[str] = set()


@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in CALLS), ("shrink", False)])
def test_a_call_leaves_everything_as_it_was(name: str, training: bool, tmp_path: Path) -> None:
    model = make_tiny("llama").train(training)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    if name not in CALLED:  # imports, which may set something once
        CALLS[name](model, tmp_path)
        CALLED.add(name)
    before = state_of(model)
    CALLS[name](model, tmp_path / "again")
    after = state_of(model)
    assert [key for key in before if before[key] != after[key]] == []


# A model in the hands of transformers and peft.


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def small(model: PreTrainedModel) -> PreTrainedModel:
    """A layer less, by the flow of the README: measured, ranked, removed."""
    plan = lp.rank(model, IDS, criterion="bi").plan(1)
    return lp.remove_layers(model, plan)


def test_inside_a_pipeline(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_tiny("llama", vocab_size=260).eval()
    writes = pipeline("text-generation", model=model, tokenizer=tokenizer)
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    before = writes("one two", **asked)
    pruned = small(writes.model)
    assert writes("one two", **asked) == before
    again = pipeline("text-generation", model=pruned, tokenizer=tokenizer)
    assert again("one two", **asked)[0]["generated_text"].startswith("one two")


def test_in_the_hands_of_a_trainer(tmp_path: Path) -> None:
    model = make_tiny("llama")
    rows = [{"input_ids": row, "labels": row} for row in IDS]

    def trained(this: PreTrainedModel, folder: str) -> Trainer:
        how = TrainingArguments(
            str(tmp_path / folder),
            max_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        trainer = Trainer(this, how, train_dataset=rows)  # type: ignore[arg-type]
        trainer.train()
        return trainer

    trainer = trained(model, "dense")
    pruned = small(trainer.model)
    assert lp.perplexity(trainer.model, IDS).value > 0
    assert trained(pruned, "pruned").model.config.num_hidden_layers == model.config.num_hidden_layers - 1


def test_after_a_merge_of_peft() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        make_tiny("llama"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    expected = adapted.eval()(IDS).logits
    merged = adapted.merge_and_unload()
    pruned = small(merged)
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, peft.tuners.lora.LoraLayer) for module in pruned.modules())
    assert isinstance(pruned, nn.Module)
    assert lp.perplexity(pruned, IDS).value > 0
