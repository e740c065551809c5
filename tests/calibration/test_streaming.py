"""Statistics of a layer are those of the model whose earlier layers are compressed, whatever the family."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from helpers import LAYERS, as_batch, inputs_of, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.methods.magnitude import Magnitude
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import hidden_of
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import find_structure


@torch.no_grad()
def halve(model: PreTrainedModel, projections: Sequence[Projection]) -> None:
    for p in projections:
        p.weight(model).copy_(Magnitude().compress(p.weight(model), 0.5))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen2"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_layer_sees_what_the_compressed_layers_before_it_make(
    name: str, batch_size: int, ids: torch.Tensor
) -> None:
    model = make_tiny(name)
    projections = find_projections(wrap(model))
    references = {}
    partly = copy.deepcopy(model)
    for layer in range(LAYERS):
        references[layer] = inputs_of(partly, ids)
        halve(partly, [p for p in projections if p.layer == layer])
    seen: list[str] = []

    def change(here: Sequence[Projection], found: dict[str, Statistics]) -> None:
        for p in here:
            x = references[p.layer][p.module]
            gram = found[p.name].gram
            assert gram is not None
            torch.testing.assert_close(gram, x.T @ x, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[p.name].norms, x.norm(dim=0), rtol=1e-5, atol=1e-6)
            seen.append(p.name)
        halve(model, here)

    stream(model, as_batch(model, ids), projections, "gram", change, batch_size=batch_size)
    assert seen == [p.name for p in projections]
    for before, after in zip(partly.parameters(), model.parameters(), strict=True):
        assert torch.equal(before, after)


def test_a_pass_runs_every_layer_twice(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    calls = [0] * LAYERS
    layers = find_structure(llama).layers
    batch = as_batch(llama, ids)
    before = [layer.mlp.register_forward_hook(lambda *a, i=i: calls.__setitem__(i, calls[i] + len(a[2])))
              for i, layer in enumerate(layers)]  # fmt: skip
    stream(llama, batch, find_projections(wrap(llama)), "norms", lambda here, found: None)
    for handle in before:
        handle.remove()
    tried = 2 + 1 + 1  # whole, other tokens twice, and alone, on one window, to find where a forward can begin
    assert max(calls) <= 2 * len(ids) + tried
    assert calls[-1] >= len(ids)


def test_norms_need_no_gram(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    grams, norms = {}, {}
    batch, projections = as_batch(llama, ids), find_projections(wrap(llama))
    stream(llama, batch, projections, "gram", lambda here, found: grams.update(found))
    stream(llama, batch, projections, "norms", lambda here, found: norms.update(found))
    for name, statistics in norms.items():
        assert statistics.gram is None
        torch.testing.assert_close(statistics.norms, grams[name].norms, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sensitivity_is_the_expected_square_of_the_derivative(name: str, ids: torch.Tensor) -> None:
    """Against the derivative of the layer's output by the output of its last matrix, column by column."""
    model = make_tiny(name).double()
    structure = find_structure(model)
    projections = [
        p for p in find_projections(wrap(model)) if p.layer == 2 and p.component in ("mlp.up_proj", "mlp.c_fc")
    ]
    (p,) = projections
    few = ids[:1, :6]
    found: dict[str, Statistics] = {}
    many = as_batch(model, few.repeat(3000, 1))
    stream(model, many, projections, "sensitivity", lambda here, s: found.update(s), batch_size=3000)
    module, layer = model.get_submodule(p.module), structure.layers[2]
    shift = torch.zeros(6, p.stop, dtype=torch.float64)
    outputs: list[torch.Tensor] = []

    def output_with(shift: torch.Tensor) -> torch.Tensor:
        handles = [
            module.register_forward_hook(lambda m, a, y: y + shift),
            layer.register_forward_hook(lambda m, a, y: outputs.append(y if isinstance(y, torch.Tensor) else y[0])),
        ]
        model(few, use_cache=False)
        for handle in handles:
            handle.remove()
        return outputs.pop()

    J: torch.Tensor = torch.autograd.functional.jacobian(output_with, shift)  # type: ignore[assignment]
    J = J.flatten(0, -3)  # outputs × tokens × m
    wanted = 3000 * torch.einsum("oti,otj->ij", J, J)
    sensitivity = found[p.name].sensitivity
    assert sensitivity is not None
    assert (sensitivity - wanted).norm() < 0.1 * wanted.norm()


def sensitivities(
    model: PreTrainedModel, ids: torch.Tensor, projections: Sequence[Projection], *, of_loss: bool = False
) -> dict[str, torch.Tensor]:
    """`Σ_t g_t g_tᵀ` as `Statistics` states it, straight from autograd over the whole model, a window at a time.

    `g_t = ∂⟨v, h⟩/∂y_t`, `h` the output of the layer, `v ~ N(0, I)` with the layer's index as seed; with `of_loss` the
    derivative of the next-token loss instead, which is another thing.
    """
    layer = find_structure(model).layers[projections[0].layer]
    generator = torch.Generator().manual_seed(projections[0].layer)
    y: dict[str, torch.Tensor] = {}
    h: list[torch.Tensor] = []
    handles = [
        model.get_submodule(p.module).register_forward_hook(lambda m, a, out, name=p.module: y.update({name: out}))
        for p in projections
    ]
    handles.append(layer.register_forward_hook(lambda m, a, out: h.append(hidden_of(out))))
    sums: dict[str, torch.Tensor] = {}
    for window in ids.split(1):
        loss = model(window, labels=window, use_cache=False).loss
        v = torch.randn(h[-1].shape, generator=generator)
        scalar = loss if of_loss else (v * h[-1]).sum()
        for name, g in zip(y, torch.autograd.grad(scalar, list(y.values())), strict=True):
            sums[name] = sums.get(name, 0) + torch.einsum("bti,btj->ij", g, g)
    for handle in handles:
        handle.remove()
    return {p.name: sums[p.module][p.start : p.stop, p.start : p.stop] for p in projections}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sensitivity_is_what_statistics_says(name: str, ids: torch.Tensor) -> None:
    """Every matrix of a layer, queries and keys that move other tokens included; the loss's gradient does not pass."""
    model = make_tiny(name).double()
    projections = [p for p in find_projections(wrap(model)) if p.layer == 2]
    found: dict[str, Statistics] = {}
    stream(model, as_batch(model, ids), projections, "sensitivity", lambda here, s: found.update(s))
    exact, other = (sensitivities(model, ids, projections, of_loss=of_loss) for of_loss in (False, True))
    assert found.keys() == exact.keys()
    for matrix, statistics in found.items():
        Q = statistics.sensitivity
        assert Q is not None
        torch.testing.assert_close(Q, exact[matrix], rtol=1e-9, atol=1e-12 * float(exact[matrix].diagonal().sum()))
        cosine = float((Q * other[matrix]).sum() / Q.norm() / other[matrix].norm())
        assert cosine < 0.99, "a Gramian of the loss's gradient would pass for this one but for its scale"


def test_models_leave_no_trace(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    def fails(here: Sequence[Projection], found: dict[str, Statistics]) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        stream(llama, as_batch(llama, ids), find_projections(wrap(llama)), "sensitivity", fails)
    for module in llama.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in module.__dict__


def test_what_cannot_be_measured_is_refused(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    projections = find_projections(wrap(model))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(LyapunovPruneError, match=r"layers\.1\.mlp\.down_proj"):
        stream(model, as_batch(model, ids), projections, "norms", lambda here, found: None)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen2"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_weights_and_drift_are_sums_over_the_tokens_of_both_models(
    name: str, batch_size: int, ids: torch.Tensor
) -> None:
    """`Σ a x xᵀ` and `Σ a (x⁰ − x) xᵀ`, with `x⁰` of a whole forward of the dense model."""
    dense, model = make_tiny(name), make_tiny(name)
    projections = find_projections(wrap(model))
    before, partly = inputs_of(dense, ids), copy.deepcopy(model)
    references = {}
    for layer in range(LAYERS):
        references[layer] = inputs_of(partly, ids)
        halve(partly, [p for p in projections if p.layer == layer])
    generator = torch.Generator().manual_seed(0)
    a = {p.module: torch.rand(ids.numel(), generator=generator, dtype=torch.float64) for p in projections}
    weights = {module: list(of_module.split(batch_size * ids.shape[1])) for module, of_module in a.items()}
    seen = []

    def change(here: Sequence[Projection], found: dict[str, Statistics]) -> None:
        for p in here:
            x, x0, s = references[p.layer][p.module], before[p.module], found[p.name]
            weighted = x * a[p.module].unsqueeze(1)
            torch.testing.assert_close(s.gram, weighted.T @ x, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(s.drift, (x0 - x).T @ weighted, rtol=1e-4, atol=1e-5)
            seen.append(p.name)
        halve(model, here)

    batch, beside = as_batch(model, ids), read(wrap(dense), as_batch(dense, ids))
    stream(model, batch, projections, "gram", change, batch_size=batch_size, weights=weights, dense=beside)
    assert seen == [p.name for p in projections]


def test_tokens_that_differ_between_the_two_models_are_refused(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    projections = find_projections(wrap(llama))
    weights = {p.module: [torch.ones(3, dtype=torch.float64)] * len(ids) for p in projections}
    with pytest.raises(LyapunovPruneError, match="same tokens"):
        stream(llama, as_batch(llama, ids), projections, "gram", lambda here, found: None, weights=weights)
