"""What is written layer by layer is what was held, under the names that transformers gives it, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families.zoo import make_zoo
from helpers import make_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.checkpoints import saving
from lyapunov_prune.checkpoints.saving import Shards
from lyapunov_prune.checkpoints.streamed import load_streamed
from lyapunov_prune.errors import CheckFailed
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.size import model_size
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import find_structure


def write(source: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, leave: int = -1) -> Path:
    """`source`, saved and streamed, to a folder of its own; the layer `leave` is not written."""
    source.save_pretrained(folder / "source")
    tokenizer.save_pretrained(folder / "source")
    model, target = load_streamed(folder / "source").model, folder / "target"
    target.mkdir()
    written = Shards(wrap(model), tokenizer, target)
    for layer in range(find_structure(model).num_layers):
        if layer != leave:
            with layer_held(model, layer):
                written.write(layer)
    written.finish()
    assert sum(t.nbytes for t in tensors(target).values()) == model_size(model).bytes
    return target


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "model",
    [
        lambda: make_tiny("llama"),
        lambda: make_tiny("llama", tie_word_embeddings=True),
        lambda: make_tiny("gpt2").bfloat16(),
        lambda: make_zoo("mixtral"),
    ],
    ids=["llama", "tied", "bfloat16", "fused experts"],
)
def test_files_hold_what_transformers_saves(model: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    source = model()
    target = write(source, tokenizer, tmp_path)
    wanted, found = tensors(tmp_path / "source"), tensors(target)
    assert wanted.keys() == found.keys()
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in wanted.items())
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (target / name).read_text() == (tmp_path / "source" / name).read_text()
    assert len([*target.glob("*.safetensors")]) == find_structure(source).num_layers + 1
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(target).eval()(ids).logits, source.eval()(ids).logits)


def test_settings_of_generation_come_along(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_tiny("llama")
    assert model.generation_config is not None
    model.generation_config.repetition_penalty = 1.25
    target = write(model, tokenizer, tmp_path)
    assert '"repetition_penalty": 1.25' in (target / "generation_config.json").read_text()


def test_a_layer_that_is_not_written_is_missed(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"lacks 9.*LlamaForCausalLM"):
        write(make_tiny("llama"), tokenizer, tmp_path, leave=3)


def test_one_bit_that_is_written_otherwise_is_seen(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(stored: dict[str, torch.Tensor], *rest: Any) -> None:
        if "model.norm.weight" in stored:
            stored["model.norm.weight"] = stored["model.norm.weight"].clone()
            stored["model.norm.weight"].view(torch.int32)[0] ^= 1
        save_file(stored, *rest)

    monkeypatch.setattr(saving, "save_file", spoiled)
    with pytest.raises(CheckFailed, match="other weights than"):
        write(make_tiny("llama"), tokenizer, tmp_path)
