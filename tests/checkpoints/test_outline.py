"""A model known from its files alone: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families.zoo import make_zoo
from helpers import bert, edit_json, make_tiny
from packed_files import pack_others
from safetensors.torch import load_file, save_file
from transformers import BertLMHeadModel, PreTrainedTokenizerFast

from lyapunov_prune import compress
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.checkpoints.reloading import wrong_packed_keys
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.packed import write_packed
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.structure import identify


def test_it_is_the_model_without_its_numbers(checkpoint: Path) -> None:
    read, model = read_outline(checkpoint, checkpoint), load(checkpoint).model
    assert all(tensor.is_meta for tensor in read.model.parameters())
    assert read.identity == identify(model)
    assert dict(read.sizes()) == {name: tensor.nbytes for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["../x.safetensors", "{}/x.safetensors", "x.bin"])
@pytest.mark.parametrize("where", ["index", "config"])
def test_nothing_outside_is_read(name: str, where: str, checkpoint: Path, tmp_path: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    save_file(weights, tmp_path / "x.safetensors", {"format": "pt"})
    torch.save(weights, checkpoint / "x.bin")
    name = name.format(tmp_path)
    if where == "index":
        (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
    with pytest.raises(LyapunovPruneError, match=f"names {name} as weights"):
        read_outline(checkpoint, checkpoint)


def test_a_broken_generation_config_is_refused(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.')
    with pytest.raises(LyapunovPruneError, match=r"generation_config\.json"):
        read_outline(checkpoint, checkpoint)


def test_an_encoder_is_refused(checkpoint: Path) -> None:
    BertLMHeadModel(bert()).save_pretrained(checkpoint)
    with pytest.raises(LyapunovPruneError, match="cannot be judged"):
        read_outline(checkpoint, checkpoint)


def test_weights_that_stay_packed_are_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(LyapunovPruneError, match=r"quantised \(gptq\)"):
        read_outline(checkpoint, checkpoint)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3", "opt"])
def test_packed_integers_are_read_as_they_are_unpacked_on_loading(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_tiny(name)
    done = compress(model, method="rtn", bits=4, group_size=8, symmetric=True)
    write_packed(model, done, tokenizer, tmp_path / "packed", "packed")
    found = read_outline(tmp_path / "packed", "packed")
    assert found.identity.same_as(identify(done.model))
    for key, W in done.model.state_dict().items():
        memory = torch.empty_like(W)
        found.fill(memory, key)
        assert torch.equal(memory, W), key


def test_packed_experts_are_read_too_and_what_another_left_dense(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make_zoo("mixtral").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pack_others(tmp_path, "block_sparse_moe.gate.", "layers.2.self_attn.o_proj")
    assert read_outline(tmp_path, "packed").identity.same_as(identify(load(tmp_path).model))


def test_nothing_is_said_on_stderr_of_packed_matrices(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The library would warn of each of them, for the shape that it guesses on the `meta` device."""
    pack_others(checkpoint)
    found = read_outline(checkpoint, checkpoint)
    assert not wrong_packed_keys(checkpoint, found.model.config)
    assert capfd.readouterr().err == ""
