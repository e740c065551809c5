"""OWL's outlier shares and sparsities against numpy in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import captured, make_tiny, moe
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.allocation.allocation import Allocation, Matrices
from lyapunov_prune.allocation.schedules.owl import OWL, outlier_share
from lyapunov_prune.checkpoints.streamed import load_streamed
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.streamed import stream_of


def owl(model: PreTrainedModel, budget: float, given: Any, **options: Any) -> Allocation:
    return OWL(**options).allocate(model, budget, given)


def reference(model: PreTrainedModel, ids: torch.Tensor, outlier: float) -> list[float]:
    """All scores of a layer in one heap, and the share above `outlier` times their mean."""
    norms = captured(model, ids)
    heaps: dict[int, list[np.ndarray]] = {}
    for p in find_projections(wrap(model)):
        W = p.weight(model).double().numpy()
        heaps.setdefault(p.layer, []).append((np.abs(W) * norms[p.module]).ravel())
    found = [np.concatenate(heaps[layer]) for layer in sorted(heaps)]
    return [float((heap > outlier * heap.mean()).mean()) for heap in found]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("outlier", [2.0, 5.0])
def test_the_shares_and_the_sparsities_are_those_of_the_definition(
    name: str, outlier: float, ids: torch.Tensor
) -> None:
    model = make_tiny(name)
    matrices = Matrices.of(model)
    D = np.array(reference(model, ids, outlier))
    # A float32 forward may put an entry on the other side of the limit.
    np.testing.assert_allclose(outlier_share(model, ids, matrices, outlier), D[matrices.layers], atol=2e-4)
    assert np.ptp(D) > 1e-3

    found = owl(model, 0.5, ids, outlier=outlier, width=0.1)
    s = found.by_layer()
    place = (D - D.min()) / np.ptp(D)
    np.testing.assert_allclose(s, 0.5 - 0.2 * (place - place.mean()), atol=5e-3)
    assert (np.argsort(s) == np.argsort(-D)).all()
    np.testing.assert_allclose(np.ptp(s), 0.2)
    assert abs(found.mean - 0.5) <= 1e-12


def test_the_layer_is_the_unit_and_not_the_matrix(ids: torch.Tensor) -> None:
    """One matrix of large scores makes the outliers of its layer, of which it is the greater part by itself."""
    model = make_tiny("llama")
    with torch.no_grad():
        model.get_submodule("model.layers.2.self_attn.k_proj").weight *= 30
    matrices = Matrices.of(model)
    D = outlier_share(model, ids, matrices, 5.0)
    assert (D[matrices.layers == 2] == D.max()).all()
    np.testing.assert_allclose(D[matrices.layers == 2][0], reference(model, ids, 5.0)[2], atol=2e-4)
    assert owl(model, 0.5, ids).by_layer().argmin() == 2


def test_a_streamed_model_is_read_once_for_the_inputs_and_once_for_the_shares(
    ids: torch.Tensor, checkpoint: Path
) -> None:
    whole, apart = load(checkpoint).model, load_streamed(checkpoint).model
    stream: Any = stream_of(apart)
    before = stream.passes
    shares = outlier_share(apart, ids, Matrices.of(apart), 2.0)
    assert stream.passes == before + 2
    np.testing.assert_allclose(shares, outlier_share(whole, ids, Matrices.of(whole), 2.0), atol=2e-4)


def test_layers_without_outliers_are_alike(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = owl(llama, 0.5, ids, outlier=1e9)
    assert (found.amount == 0.5).all()
    assert found.measured_on[0].tokens == ids.numel()


@pytest.mark.parametrize(("outlier", "width"), [(0.0, 0.08), (5.0, -0.1), (np.nan, 0.08)])
def test_parameters_without_sense_are_refused(
    llama: PreTrainedModel, ids: torch.Tensor, outlier: float, width: float
) -> None:
    with pytest.raises(LyapunovPruneError, match=r"(outlier|width) of owl"):
        owl(llama, 0.5, ids, outlier=outlier, width=width)


def test_experts_count_among_the_matrices_of_their_layer(ids: torch.Tensor) -> None:
    model = moe("mixtral")
    found = owl(model, 0.5, ids, outlier=2.0)
    layers = np.array([p.layer for p in find_projections(wrap(model))])
    assert len(found.amount) == len(layers)
    assert len({*found.amount[layers == 0]}) == 1
    assert len({*found.amount.round(6)}) > 1
