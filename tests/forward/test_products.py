"""What enters and leaves a matrix is seen whether its module is called or its weight is multiplied without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.zoo import make_zoo
from helpers import hooks_of, make_tiny
from torch import nn
from transformers.models.mamba import modeling_mamba

from lyapunov_prune import LyapunovPruneError, compress
from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.forward.products import Product, watched_products
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.sensitivity.sensitivity import measure_sensitivity

# Families that multiply by matrices stacked in a parameter, of heads or of experts that a router chooses.
BARE = ("dbrx", "deepseek_v4", "inkling_text", "recurrent_gemma", "zamba")


def seen_in(model: Any, ids: torch.Tensor) -> tuple[set[str], set[str]]:
    """The products of a model that were seen, and those that were not."""
    projections = {p.product: p for p in find_projections(wrap(model))}
    seen: set[str] = set()

    def note(product: Product) -> None:
        p, x = projections[product.name], product.x
        y = product.output.transpose(-1, -2) if product.rows_are_features else product.output
        assert x.shape[-1] == p.weight(model).shape[1], p.name
        assert x.shape[:-1] == y.shape[:-1]
        if p.stack:
            torch.testing.assert_close(y, x @ p.weight(model).T, rtol=1e-4, atol=1e-5)
        seen.add(product.name)

    with torch.no_grad(), watched_products(model, list(projections.values()), note):
        run_backbone(find_structure(model), ids)
    assert hooks_of(model) == 0
    return seen, projections.keys() - seen


@pytest.mark.parametrize("name", ["mamba", "llama4", "jetmoe", "gpt_oss", *BARE])
def test_every_product_is_that_of_its_matrix(name: str) -> None:
    model = make_zoo(name)
    ids = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
    seen, unseen = seen_in(model, ids)
    assert seen
    assert not [m for m in unseen if ".experts." not in m]  # an expert without tokens


@pytest.mark.parametrize("name", BARE)
def test_watching_changes_no_output(name: str) -> None:
    """Stacked matrices are multiplied one after the other while they are watched."""
    model: Any = make_zoo(name).double()
    model.set_experts_implementation("eager")  # torch has no grouped product of float64
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        with watched_products(model, find_projections(wrap(model)), lambda product: None):
            torch.testing.assert_close(model(ids, use_cache=False).logits, before, rtol=1e-9, atol=1e-9)


@pytest.fixture
def mamba() -> Any:
    return make_zoo("mamba").double()


@pytest.fixture
def text() -> torch.Tensor:
    return torch.randint(3, 90, (3, 12), generator=torch.Generator().manual_seed(0))


def test_statistics_of_a_weight_that_mamba_multiplies_by_itself(
    mamba: Any, text: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input is the first part of what `x_proj` gives, gradients at its output are those at the scan's steps."""
    layer = 2
    mixer = mamba.backbone.layers[layer].mixer
    inputs: list[torch.Tensor] = []
    steps: list[torch.Tensor] = []
    scan = modeling_mamba.mamba_selective_scan

    def recorded(x: torch.Tensor, delta: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        steps.append(delta)
        return scan(x, delta, *args, **kwargs)

    found: dict[str, Statistics] = {}
    (p,) = (p for p in find_projections(wrap(mamba)) if p.layer == layer and p.module.endswith("dt_proj"))
    stream(mamba, text, [p], "sensitivity", lambda here, s: found.update(s), batch_size=3)
    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", recorded)
    handle = mixer.x_proj.register_forward_hook(lambda m, a, y: inputs.append(y[..., : mixer.time_step_rank]))
    outputs: list[torch.Tensor] = []
    last = mamba.backbone.layers[layer].register_forward_hook(lambda m, a, y: outputs.append(y))
    mamba.backbone(input_ids=text, use_cache=False)
    handle.remove()
    last.remove()
    x = inputs[0].detach().flatten(0, 1)
    torch.testing.assert_close(found[p.name].gram, x.T @ x)
    torch.testing.assert_close(found[p.name].norms, x.norm(dim=0))
    torch.testing.assert_close(input_norms(mamba, text, [p])[p.name], found[p.name].norms)
    generator = torch.Generator().manual_seed(layer)
    v = torch.stack([torch.randn(window.shape, generator=generator) for window in outputs[0]]).double()
    (g,) = torch.autograd.grad(outputs[0], steps[layer], v)
    rows = g.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(found[p.name].sensitivity, rows.T @ rows)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_what_goes_by_inputs_takes_mamba(name: str, text: torch.Tensor) -> None:
    model = make_zoo(name)
    (p,) = (p for p in find_projections(wrap(model)) if p.layer == 1 and p.module.endswith("dt_proj"))
    for method in ("wanda", "sparsegpt", "whitened-svd", "balanced"):
        small = compress(model, text, method=method, sparsity=0.5).model
        assert not torch.equal(p.weight(small), p.weight(model)), method
    half = compress(model, text, method="wanda", sparsity=0.5).model
    assert ((p.weight(half) == 0).sum(1) == p.weight(half).shape[1] // 2).all()
    other = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    found = measure_sensitivity(model, other, studies=["group"], method="wanda", calibration=text)
    assert found.of("group").component.str.endswith("dt_proj").any()


def test_a_matrix_without_a_part_is_refused_with_what_helps(text: torch.Tensor) -> None:
    model = make_zoo("bart")
    refused = r"no product with model\.decoder\.layers\.0\.encoder_attn\.k_proj is seen .*encoder.*method='magnitude'"
    with pytest.raises(LyapunovPruneError, match=refused):
        compress(model, text, method="wanda", sparsity=0.5)
    assert compress(model, method="magnitude", sparsity=0.5, allocation="uniform").model
    with pytest.raises(LyapunovPruneError, match=r"adapter_list.*adapters of other layers.*allocation"):
        input_norms(shared := make_zoo("zamba2"), text, find_projections(wrap(shared)))


def test_planted_fault_products_with_a_cast_or_inside_a_call_are_not_counted(text: torch.Tensor) -> None:
    model = make_tiny("llama")
    (p,) = (p for p in find_projections(wrap(model)) if p.name == "model.layers.1.mlp.up_proj")
    module: Any = model.get_submodule(p.module)
    seen: list[bool] = []
    with torch.no_grad(), watched_products(model, [p], lambda product: seen.append(product.rows_are_features)):
        model(text)
        assert seen == [False]  # the module's own call, once
        nn.functional.linear(torch.ones(2, 32), module.weight)
        module.weight @ torch.ones(32, 2)
        module.weight.half() @ torch.ones(32, 2).half()
        torch.ones(2, 48) @ module.weight
    assert seen == [False, False, True]
