"""Dither: the steps are those of the stored blocks, and the noise fills one step and no more."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers import make_tiny

import lyapunov_prune as lp
from experiments.common import Model
from experiments.dither import BLOCK, dither, steps_of
from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.models.decoder import wrap


def rounded(W: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """W rounded by the GGUF reference, and the step stored in each of its blocks of 32."""
    of = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(W.detach().numpy(), of)
    size = gguf.GGML_QUANT_SIZES[of][1]
    scales = np.ascontiguousarray(data.reshape(len(W), -1, size)[..., :2]).view(np.float16)[..., 0]
    return torch.tensor(gguf.quants.dequantize(data, of)), torch.tensor(scales.astype(np.float64)).abs()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_steps_are_those_stored_in_the_file(kind: str) -> None:
    W, stored = rounded(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)), kind)
    found = steps_of(W)
    right = np.isclose(found.numpy(), stored.repeat_interleave(32 // BLOCK, 1).numpy(), rtol=1e-4)
    # A block whose values all lie an even number of steps apart cannot be told from one of twice the step.
    assert right.mean() > 0.999, right.mean()


def test_a_matrix_off_the_grid_and_a_constant_one_have_no_step() -> None:
    W = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    assert not steps_of(W).any()
    assert not steps_of(torch.full((2, 32), 0.3)).any()


def test_the_noise_is_uniform_within_half_a_step_seeded_and_leaves_the_model_given() -> None:
    model = make_tiny("llama")
    places = {name: W for name, W in model.named_parameters() if "proj" in name and W.shape[1] % 32 == 0}
    steps = {}
    for name, W in places.items():
        W.data, steps[name] = rounded(W.data, "Q4_1")
    before = {name: W.clone() for name, W in model.named_parameters()}
    made, again, other = (dither(wrap(model), seed) for seed in (3, 3, 4))
    ratios = []
    for name, W in made.decoder.model.named_parameters():
        assert torch.equal(model.get_parameter(name), before[name])
        assert torch.equal(W, again.decoder.model.get_parameter(name))
        if name not in places:
            assert torch.equal(W, before[name])
            assert not made.on_grid.get(name)
            continue
        assert made.on_grid[name] > 0.99
        assert not torch.equal(W, other.decoder.model.get_parameter(name))
        ratios.append(((W - before[name]).double() / steps[name].repeat_interleave(32, 1)).flatten())
    moved = torch.cat(ratios)
    assert moved.abs().max() < 0.501
    assert abs(moved.mean()) < 0.01
    assert moved.std().item() == pytest.approx(12**-0.5, rel=0.02)


def test_an_experiment_asks_for_a_dithered_model_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    model = make_tiny("llama")
    for name, W in model.named_parameters():
        if "proj" in name and W.shape[1] % 32 == 0:
            W.data, _ = rounded(W.data, "Q4_1")
    monkeypatch.setattr(lp, "load", lambda name, **options: {str(file): wrap(model)}[name])
    asked = Model(f"{file}-dithered-7")
    made = asked.load().model
    assert made.config._name_or_path == asked.folder(tmp_path).name == "tiny-dithered-7"
    wanted = dict(dither(wrap(model), 7).decoder.model.named_parameters())
    assert all(torch.equal(W, wanted[name]) for name, W in made.named_parameters())


def test_a_model_without_a_grid_or_in_half_precision_is_refused() -> None:
    with pytest.raises(LyapunovPruneError):
        dither(wrap(make_tiny("llama")))
    with pytest.raises(LyapunovPruneError):
        dither(wrap(make_tiny("llama").to(torch.bfloat16)))
