"""Two models that hold the same numbers hold them once."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lyapunov_prune.models import sharing
from lyapunov_prune.models.sharing import own, share_equal, shared_memo, shared_with


def pair() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    with torch.no_grad():
        model.weight[0, 0] = 0.0
    return model, copy.deepcopy(model)


def apart(model: nn.Module, other: nn.Module) -> list[str]:
    places = {p.data_ptr() for p in other.parameters()}
    return [name for name, p in model.named_parameters() if p.data_ptr() not in places]


@pytest.mark.parametrize("piece", [1, 24, 2**24])  # 24 bytes of 140: the last piece is another length
def test_equal_numbers_are_held_once(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_PIECE", piece)
    model, other = pair()
    share_equal(model, dict(other.named_parameters()))
    assert apart(model, other) == []


@pytest.mark.parametrize("piece", [24, 2**24])
@pytest.mark.parametrize(("place", "number"), [((4, 6), 0.25), ((0, 0), -0.0)])
def test_another_number_or_another_zero_is_not_the_same(
    piece: int, place: tuple[int, int], number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_PIECE", piece)
    model, other = pair()
    with torch.no_grad():
        model.weight[place] = number
    before = model.weight.detach().clone()
    share_equal(model, dict(other.named_parameters()))
    assert apart(model, other) == ["weight"]
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("change", [lambda m: m.double(), lambda m: m.register_parameter("weight", None)])
def test_another_dtype_or_no_twin_is_left_alone(change: Any) -> None:
    model, other = pair()
    change(other)
    share_equal(model, dict(other.named_parameters()))
    assert "weight" in apart(model, other)


def mapped_pages() -> int:
    """Bytes of files that this process holds in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much of a file is in memory")
@pytest.mark.parametrize("same", [True, False])
def test_a_mapped_file_is_in_memory_a_piece_at_a_time(same: bool, tmp_path: Path) -> None:
    weights = {"a": torch.randn(2**23), "b": torch.randn(5)}  # 32 MiB, two pieces
    save_file(weights, tmp_path / "file")
    read = load_file(tmp_path / "file")
    model = nn.ParameterDict({name: nn.Parameter(x, requires_grad=False) for name, x in read.items()})
    if not same:  # in the last piece, when the first is let go
        weights["a"] = torch.cat([weights["a"][:-1], torch.zeros(1)])
    before = mapped_pages()
    share_equal(model, weights)
    assert mapped_pages() - before < 2**24 + 2**22
    assert apart(model, nn.ParameterDict(weights)) == ([] if same else ["a"])
    assert torch.equal(read["a"], model["a"])


def test_a_copy_lies_where_the_model_does_until_it_owns_its_numbers() -> None:
    model, _ = pair()
    made = copy.deepcopy(model, shared_memo(model))
    assert apart(made, model) == []
    assert made.weight is not model.weight
    before = model.weight.detach().clone()
    own(made)
    with torch.no_grad():
        made.weight.zero_()
    assert apart(made, model) == ["weight", "bias"]
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_share_a_parameter(device: str) -> None:
    layers: Any = nn.ModuleList(nn.Linear(2, 2, device=device) for _ in range(4))
    layers[3].weight = layers[1].weight
    found = [shared_with(layers, i) for i in range(4)]
    assert found == [{}, {"weight": 3}, {}, {"weight": 1}]
