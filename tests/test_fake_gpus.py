"""On GPUs that are none (`fake_gpus.py`): what was made on the CPU, or is on another GPU, meets none of the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from fake_gpus import FakeGPUs, spread
from helpers import make_tiny
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.predictions.divergence import skip_divergence


def mended(model: PreTrainedModel, ids: torch.Tensor) -> pd.DataFrame:
    small = lp.mend(model, [1], ids).model
    return pd.DataFrame([float(p.detach().double().norm()) for p in small.parameters()])


MEASUREMENTS: dict[str, Callable[[Any, torch.Tensor], pd.DataFrame]] = {
    "contraction": lambda model, ids: lp.measure_contraction(model, ids).to_frame(),
    "influence": lambda model, ids: lp.block_influence(model, ids).to_frame(),
    "kl": lambda model, ids: skip_divergence(model, ids).to_frame(),
    "perplexity": lambda model, ids: lp.perplexity(model, ids).to_frame(),
    "mend": mended,
    "bounds": lambda model, ids: lp.check_bounds(model, ids[:1]).to_frame(),
    "hierarchy": lambda model, ids: lp.probe_layers(model, ids[:2, :8], steps=2).to_frame(),
}


@pytest.mark.parametrize(("name", "gpus"), [("contraction", 1), *((name, 2) for name in MEASUREMENTS)])
def test_a_measurement(name: str, gpus: int, ids: torch.Tensor) -> None:
    model = make_tiny("llama", num_hidden_layers=3)
    wanted = MEASUREMENTS[name](model, ids)
    with FakeGPUs():
        here = copy.deepcopy(model)
        here = here.to("cuda:0") if gpus == 1 else spread(here, 1)
        places = {str(p.device) for p in here.parameters()}
        found = MEASUREMENTS[name](here, ids)
    assert len(places) == gpus
    assert all(place.startswith("cuda") for place in places)
    one, other = (frame.select_dtypes("number").to_numpy(float) for frame in (wanted, found))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "planted",
    [
        lambda h: h + torch.zeros(h.shape[-1]),
        lambda h: h @ torch.eye(h.shape[-1]),
        lambda h: torch.stack([h, h.to("cuda:1")]),
        lambda h: torch.from_numpy(np.ones(2)).to("cuda:1") * torch.ones(2, device=h.device),
        lambda h: torch.randn(2, device=h.device, generator=torch.Generator()),
        lambda h: h.numpy(),
    ],
    ids=["CPU", "matrix", "GPUs", "array", "generator", "numpy"],
)
def test_a_planted_tensor_is_seen(planted: Callable[[torch.Tensor], object]) -> None:
    model: Any = make_tiny("llama", num_hidden_layers=2)
    seen: list[BaseException] = []

    def hook(module: object, args: object, output: torch.Tensor) -> None:
        with pytest.raises((RuntimeError, TypeError)) as error:
            planted(output.detach())
        seen.append(error.value)

    with FakeGPUs():
        model.to("cuda:0")
        model.get_submodule("model.layers.0").register_forward_hook(hook)
        model(torch.zeros(1, 4, dtype=torch.int64).to("cuda:0"))
    assert seen
