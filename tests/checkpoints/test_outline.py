"""A model known from its files alone: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bert
from safetensors.torch import load_file, save_file
from transformers import BertLMHeadModel

from lyapunov_prune.checkpoints import outline
from lyapunov_prune.checkpoints.outline import layer_of, read_outline
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.structure import identify


def test_it_is_the_model_without_its_numbers(checkpoint: Path) -> None:
    read, model = read_outline(checkpoint, checkpoint), load(checkpoint).model
    assert all(tensor.is_meta for tensor in read.model.parameters())
    assert read.identity == identify(model)
    assert dict(read.sizes()) == {name: tensor.nbytes for name, tensor in model.state_dict().items()}


def test_names_tell_the_layer(checkpoint: Path) -> None:
    structure = read_outline(checkpoint, checkpoint).structure
    names = ("model.layers.4.mlp.up_proj.weight", "model.embed_tokens.weight", "layers.4.mlp.up_proj.weight")
    assert [layer_of(name, structure) for name in names] == [4, None, None]


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
    with pytest.raises(LyapunovPruneError, match=f"names {name} as weights, .*; "):
        read_outline(checkpoint, checkpoint)


def test_a_broken_generation_config_is_refused(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.')
    with pytest.raises(LyapunovPruneError, match=r"cannot load .*generation_config\.json"):
        read_outline(checkpoint, checkpoint)


def test_an_encoder_is_refused(checkpoint: Path) -> None:
    BertLMHeadModel(bert()).save_pretrained(checkpoint)
    with pytest.raises(LyapunovPruneError, match="cannot be judged without running it"):
        read_outline(checkpoint, checkpoint)


def test_a_quantised_checkpoint_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quantised(*args: Any) -> Any:
        loaded = load_outline(*args)
        loaded.model.config.quantization_config = {"quant_method": "fp8"}
        return loaded

    load_outline = outline.load_outline
    monkeypatch.setattr(outline, "load_outline", quantised)
    with pytest.raises(LyapunovPruneError, match=r"are quantised \(fp8\); give the original weights"):
        read_outline(checkpoint, checkpoint)
