"""A tensor that changed is written as llama.cpp wants it: what is read back is what was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from helpers import VOCABULARY, make_tiny, write_gguf

from lyapunov_prune.models.gguf import read_gguf
from lyapunov_prune.models.gguf_copy import pieces_of, write_pieces
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.gguf_tensors import rounded

CHANGED = {
    "llama": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"],
    "gemma2": ["self_attn.q_proj.weight", "mlp.down_proj.weight", "post_feedforward_layernorm.weight"],
    "gpt2": ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_proj.weight", "mlp.c_proj.bias", "ln_1.weight"],
}


@pytest.mark.parametrize("name", CHANGED)
def test_changed_tensors_are_read_back_as_they_were_rounded(name: str, tmp_path: Path) -> None:
    sizes = {"max_position_embeddings": 1024} if name == "gpt2" else {}
    file = write_gguf(make_tiny(name, vocab_size=len(VOCABULARY), **sizes), tmp_path / "x.gguf", packed=True)
    options = {"dtype": torch.float32, "device_map": "cpu"}
    dense, header = read_gguf(file, options), read_header(file)
    own = {f"{dense.structure.layers_path}.2.{rest}" for rest in CHANGED[name]}
    before = dense.model.state_dict()
    generator = torch.Generator().manual_seed(0)
    changed = {key: torch.randn(before[key].shape, generator=generator) for key in sorted(own)}
    made = rounded(dense.model, changed, {tensor.name: tensor for tensor in header.tensors})
    assert {each.quantisation for each in made} == {"Q8_0", "F32"}
    pieces = pieces_of(header, range(6), {each.name: each.anew for each in made})
    write_pieces(tmp_path / "y.gguf", header.values, pieces, header.alignment)
    after = read_gguf(tmp_path / "y.gguf", options).model.state_dict()
    for (key, wanted), each in zip(changed.items(), made, strict=True):
        assert torch.equal(after[key], each.back)
        assert (each.back - wanted).abs().max() <= 4.5 / 127 / 2
    assert all(torch.equal(after[key], before[key]) for key in before.keys() - own)


@pytest.mark.parametrize(
    ("kind", "width", "written"), [("Q4_K", 256, "Q4_K"), ("Q4_K", 96, "Q8_0"), ("Q5_0", 96, "Q5_0")]
)
def test_every_type_is_written_where_rows_are_whole_blocks(kind: str, width: int, written: str, tmp_path: Path) -> None:
    model = make_tiny("llama", vocab_size=len(VOCABULARY), intermediate_size=width)
    file = write_gguf(model, tmp_path / "x.gguf")
    dense = read_gguf(file, {"dtype": torch.float32, "device_map": "cpu"})
    before = {t.name: t for t in read_header(file).tensors}
    name = "blk.0.ffn_down.weight"
    own = f"{dense.structure.layers_path}.0.mlp.down_proj.weight"
    before[name] = replace(before[name], kind=int(gguf.GGMLQuantizationType[kind]))
    norm = f"{dense.structure.layers_path}.0.input_layernorm.weight"
    changed = {key: dense.model.state_dict()[key] for key in (own, norm)}
    assert [each.quantisation for each in rounded(dense.model, changed, before)] == [written, "F32"]
