"""Tiny random decoders of every listed family, and the real built-in model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.models.loading import Loaded, load
from lyapunov_prune.text import TokenBatch, load_text

# Two test processes on two cores: more threads would spend their time waiting for each other.
torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest-xdist up to 3.8 loses its groups without a word under pytest 9.2 (pytest-xdist issue 1386)."""
    grouped = item.config.getoption("loadgroup", False) and item.get_closest_marker("xdist_group")
    if grouped and "@" not in item.nodeid:
        pytest.fail("this pytest makes every process set up what a group shares; run make install", pytrace=False)


LAYERS = 6
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING = {"sliding_window": 8}
# Every kind of layer a family mixes, and its switches.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "llama": ("llama", {}),
    "mistral": ("mistral", _SLIDING),
    "qwen2": ("qwen2", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 3}),
    "qwen3": ("qwen3", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 2}),
    "gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3}),
    "phi3": ("phi3", _SLIDING),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


def make_tiny(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of the family, float32, with weights large enough for every layer to matter."""
    model_type, extra = TINY[name]
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **extra, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=list(TINY))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return make_tiny


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """One shared tiny Llama; a test that changes its model makes its own."""
    return make_tiny("llama")


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(97, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """The real built-in model. Tests that use it share one process: xdist_group("smollm2")."""
    return load("smollm2-135m")


@pytest.fixture(scope="session")
def english(smollm2: Loaded) -> TokenBatch:
    return load_text("builtin", smollm2.tokenizer, tokens=512, context=128)


# A byte-level vocabulary with one merge: every text has a token sequence, nothing is unknown.
VOCABULARY = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]


def make_tokenizer(adds_bos: bool = False, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of 260 tokens, mostly one a byte."""
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[("t", "h")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = special or {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def reader() -> PreTrainedModel:
    """A shared tiny Llama with the vocabulary of `tokenizer`; not to be changed."""
    return make_tiny("llama", vocab_size=len(VOCABULARY))


@pytest.fixture(scope="session")
def _saved_checkpoint(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    reader.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(_saved_checkpoint: Path, tmp_path: Path) -> Path:
    """`reader` and `tokenizer` in a folder that a test may spoil."""
    return Path(shutil.copytree(_saved_checkpoint, tmp_path / "tiny"))
