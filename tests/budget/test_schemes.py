"""A folder of a size: plain transformers unpacks what was measured, in the bytes that were said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_tiny, make_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lyapunov_prune.budget.schemes import SCHEMES, Schemes, reading_alike
from lyapunov_prune.budget.spend import spend
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.loading import load
from lyapunov_prune.results.history import read_history

SIZES = {"vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 640}


def text(name: str, windows: int = 8, context: int = 32) -> TokenBatch:
    ids = torch.randint(len(VOCABULARY), (windows, context), generator=torch.Generator().manual_seed(len(name)))
    return TokenBatch(ids, name, "all", False)


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("phi3", torch.bfloat16)])
def test_a_folder_of_the_size_loads_and_costs_what_is_predicted(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, target = make_tiny(family, **SIZES).to(dtype), tmp_path / "small"
    before = {name: p.clone() for name, p in model.state_dict().items()}
    texts = {"batch": text("a", 16), "judge": text("of b"), "check": text("for c")}
    found = spend(model, make_tokenizer(), "7bpw", target, **texts)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert 6.9 < found.bits <= 7
    assert found.predicted == pytest.approx(found.measured.change, rel=0.3)
    tensors = load_file(target / "model.safetensors")
    held = {name: tensor.nbytes for name, tensor in tensors.items()}
    assert found.size == sum(held.values())
    for name, size in zip(found.names, found.bytes, strict=True):
        assert size == sum(n for key, n in held.items() if key.startswith(name)), name
    again = AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        ids = text("of b").ids
        p, q = (m.eval()(ids).logits[:, :-1].double().log_softmax(-1) for m in (model, again))
    assert float((p.exp() * (p - q)).sum(-1).mean()) == pytest.approx(found.measured.change, rel=0.05)
    assert again.dtype == torch.bfloat16
    loaded = dict(load(target).model.named_parameters())
    packed = [name for name in found.names if name not in tensors]
    assert packed
    assert all(torch.equal(loaded[name], again.get_parameter(name)) for name in packed)
    groups = json.loads((target / "config.json").read_text())["quantization_config"]["config_groups"]
    of = {name: number for number, group in groups.items() for name in group["targets"]}
    assert len(groups) > 1
    for names in ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"):
        layers = [{of.get(f"model.layers.{i}.{part}.{n}") for n in names} for i in range(6) for part in _PARTS]
        assert all(len(schemes) == 1 for schemes in layers)
    assert [on.text for step in read_history(target).steps for on in step.saw] == ["a", "for c"]
    card = (target / "README.md").read_text(encoding="utf-8")
    assert found.against_dense().told()[1:] in card
    assert "model-index:" in card
    assert found.frontier.types == ("int4 in groups of 128", "int4 in groups of 32", "int8")
    assert (found.frontier.best <= found.frontier.alike * (1 + 1e-9)).all()


_PARTS = ("self_attn", "mlp")


def test_matrices_of_one_input_share_a_scheme() -> None:
    model = wrap(make_tiny("llama", **SIZES))
    names = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")]
    names += [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    first = [reading_alike(model, names)[f"{name}.weight"] for name in names]
    assert [names.index(name.removesuffix(".weight")) for name in first] == [0, 0, 2, 3, 3, 5]


def test_bytes_of_a_whole_folder_are_not_exceeded_and_less_than_the_least_is_named(tmp_path: Path) -> None:
    model = make_tiny("llama", **SIZES)
    texts = {"batch": text("a"), "judge": text("of b"), "check": text("for c")}
    with pytest.raises(LyapunovPruneError, match=r"6\.\d+ bits"):
        spend(model, make_tokenizer(), "6bpw", tmp_path / "x", **texts)
    assert not (tmp_path / "x").exists()
    spend(model, make_tokenizer(), "200KB", tmp_path / "x", **texts)
    assert 190e3 < (tmp_path / "x" / "model.safetensors").stat().st_size <= 200e3
    with pytest.raises(LyapunovPruneError):
        spend(model, make_tokenizer(), "200KB", tmp_path / "x", **texts)


def test_what_is_read_back_is_on_the_grid_and_near() -> None:
    random = np.random.default_rng(0)
    storage, W = Schemes(wrap(make_tiny("llama", **SIZES))), random.normal(size=(8, 128)).astype(np.float32)
    left = []
    for scheme in SCHEMES:
        back = storage.rounded(W, scheme, np.ones(128, np.float32))
        groups = back.reshape(-1, scheme.group_size or 128)
        assert max(len(set(row)) for row in groups.tolist()) <= 2**scheme.bits
        left.append(float(np.square(back - W).sum()))
    assert left == sorted(left, reverse=True)
