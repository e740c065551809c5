"""The merged model is the adapted one; else it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TEXT, VOCABULARY, make_tiny
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.adapters import merge_adapters
from lyapunov_prune.models.loading import load

EMBEDDINGS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both, their adapters tied": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "head, DoRA": {"target_modules": ["lm_head"], "use_dora": True},
    "head, trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding, trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
}


def adapted(model: PreTrainedModel, **settings: Any) -> PeftModel:
    """`model` with LoRA adapters of random numbers."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about tied weights
        peft = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, **settings))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")):
                parameter.normal_(std=0.1)
    return peft.eval()


@pytest.fixture
def tied(tokenizer: PreTrainedTokenizerFast, checkpoint: Path) -> Path:
    """A folder beside `tiny` whose model has one matrix as embedding and head."""
    folder = checkpoint.parent / "tied"
    make_tiny("llama", vocab_size=len(VOCABULARY), tie_word_embeddings=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_adapters_of_tied_embeddings_are_refused(name: str, tied: Path, ids: torch.Tensor) -> None:
    """They change one of two, or both in different ways; those of single tokens change both alike."""
    peft = adapted(AutoModelForCausalLM.from_pretrained(tied), **EMBEDDINGS[name])
    expected = peft(ids).logits
    peft.save_pretrained(tied.parent / "adapters")
    if name == "some tokens":
        torch.testing.assert_close(load(tied.parent / "adapters").model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        return
    with pytest.raises(LyapunovPruneError, match="merge them with the tool"):
        load(tied.parent / "adapters")


def test_adapters_of_the_layers_leave_embeddings_tied(tied: Path) -> None:
    adapted(AutoModelForCausalLM.from_pretrained(tied), target_modules=["q_proj"]).save_pretrained(
        tied.parent / "adapters"
    )
    merged = load(tied.parent / "adapters").model
    assert merged.config.tie_word_embeddings
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


def test_repeated_layers_are_refused(checkpoint: Path, run_bad: Callable[..., str]) -> None:
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 4]]}
    adapted(AutoModelForCausalLM.from_pretrained(checkpoint), **settings).save_pretrained(
        checkpoint.parent / "adapters"
    )
    assert "merge them with the tool" in run_bad("prune", "adapters", "--layers", "1", "-o", "out", *TEXT)


@pytest.mark.parametrize("target", ["q_proj", "v_proj"])
def test_weights_that_layers_share_are_refused(target: str, tmp_path: Path) -> None:
    def shared() -> PreTrainedModel:
        model = make_tiny("llama")
        model.model.layers[3].self_attn.q_proj.weight = model.model.layers[1].self_attn.q_proj.weight
        return model

    adapted(shared(), target_modules=[target]).save_pretrained(tmp_path)
    if target == "v_proj":
        merge_adapters(shared(), tmp_path)
        return
    with pytest.raises(LyapunovPruneError, match="modules share"):
        merge_adapters(shared(), tmp_path)


def test_a_merge_that_gives_another_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    merge = LoraModel.merge_and_unload

    def wrongly(self: Any, **options: Any) -> nn.Module:
        merged = merge(self, **options)
        merged.lm_head.weight.data *= 1.01
        return merged

    adapted(make_tiny("llama"), target_modules=["q_proj"]).save_pretrained(tmp_path)
    monkeypatch.setattr(LoraModel, "merge_and_unload", wrongly)
    with pytest.raises(LyapunovPruneError, match=r"0\.01 of their spread"):
        merge_adapters(make_tiny("llama"), tmp_path)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_rounding_is_no_other_model(dtype: str, tmp_path: Path) -> None:
    adapted(make_tiny("llama"), target_modules="all-linear", lora_dropout=0.5).save_pretrained(tmp_path)
    wanted = getattr(torch, dtype)
    assert merge_adapters(make_tiny("llama").to(wanted), tmp_path).dtype == wanted


def test_adapters_for_a_larger_vocabulary_are_refused(checkpoint: Path, run_bad: Callable[..., str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.resize_token_embeddings(len(VOCABULARY) + 4)
    adapted(model, target_modules=["q_proj"]).save_pretrained(checkpoint.parent / "adapters")
    told = run_bad("prune", "adapters", "--layers", "1", "-o", "out", *TEXT)
    assert "adapters in adapters cannot be merged" in told
