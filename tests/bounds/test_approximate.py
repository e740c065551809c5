"""ApproxLinear: what it computes, what it records, and that it leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families.zoo import make_zoo
from helpers import TINY, inputs_of, make_tiny, moe, rand
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.bounds import approximate
from lyapunov_prune.bounds.approx_linear import ApproxLinear, Record, _look_up
from lyapunov_prune.bounds.approximate import Records, observe
from lyapunov_prune.bounds.approximation import approximation, certify_difference
from lyapunov_prune.compression.methods.magnitude import Magnitude
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.replacement import replaced
from lyapunov_prune.linalg import certify
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection, groups


def half(projection: Projection, W: torch.Tensor) -> torch.Tensor:
    return Magnitude().compress(W, 0.5)


def trace(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that an installation might have left behind, with object identities."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = (id(module), type(module), module.training, sorted(module.__dict__))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                address = (id(parameter), parameter.data_ptr(), parameter._version, parameter.requires_grad)
                found[f"{name}.{key}"] = (*address, parameter.detach().clone().numpy().tobytes())
        found[f"{name}()"] = [len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in module.__dict__]
    return found


def violations(records: Records) -> list[str]:
    return [str(c) for record in records.values() for c in record.checks if not c.holds]


@pytest.mark.parametrize("radius", [0.0, 0.7])
def test_every_family_installs_runs_and_restores(family: str, ids: torch.Tensor, radius: float) -> None:
    model = make_tiny(family)
    before, dense = trace(model), model(ids).logits
    with torch.no_grad(), approximate(model, half, cache_radius=radius) as records:
        changed = model(ids).logits
        assert not torch.equal(changed, dense)
        with records.suspended():
            assert torch.equal(model(ids).logits, dense)
        assert torch.equal(model(ids).logits, changed)
    assert trace(model) == before
    assert torch.equal(model(ids).logits, dense)
    assert list(records) == [p.name for p in find_projections(wrap(model))]
    assert violations(records) == []
    for record in records.values():
        assert record.check is not None
        assert record.check.inputs == 2 * ids.numel()
        assert record.probe is not None
        assert 0.9999 < record.probe.ratio < 1  # the bound is tight, so a fault of 1 % would show
        assert (record.weight_probe is not None) == (radius > 0)
    assert (sum(r.hits for r in records.values()) > 0) == (radius > 0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # fused matrices and plain ones
def test_a_model_is_whole_after_an_exception(family: str, ids: torch.Tensor) -> None:
    """Also one that comes from within the forward, or while the last matrix is installed."""
    model = make_tiny(family)
    before = trace(model)
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)  # planted
    with pytest.raises(ZeroDivisionError), approximate(model, half):
        model(ids)
    handle.remove()
    assert trace(model) == before
    broken = make_tiny(family)
    with torch.no_grad():
        next(broken.get_input_embeddings().parameters()).fill_(float("nan"))
    before = trace(broken)
    with pytest.raises(LyapunovPruneError, match="NaN or infinity"), approximate(broken, half):
        broken(ids)
    assert trace(broken) == before

    name = find_projections(wrap(model))[-1].name
    before = trace(model)
    with (
        approximate(model, lambda p, W: half(p, W) if p.name == name else None),
        pytest.raises(LyapunovPruneError, match="approximated already"),
        approximate(model, half),
    ):
        pass
    assert trace(model) == before


def test_identical_weights_change_nothing(family: str, ids: torch.Tensor) -> None:
    """Fused and transposed matrices come apart and together again without changing the output."""
    model = make_tiny(family)
    dense = model(ids).logits
    with torch.no_grad(), approximate(model, lambda p, W: W) as records:
        same = model(ids).logits
    assert torch.allclose(same, dense, rtol=0, atol=1e-5)
    for record in records.values():
        assert record.check is not None
        assert record.check.error == 0
        assert record.check.bound == 0
        assert record.check.holds


def test_runs_the_approximated_weights(family: str, ids: torch.Tensor) -> None:
    """The same logits as a model whose weights were overwritten."""
    model, twin = make_tiny(family), make_tiny(family)
    with torch.no_grad():
        for p in find_projections(wrap(twin)):
            p.weight(twin).copy_(half(p, p.weight(model)))
        expected = twin(ids).logits
        with approximate(model, half):
            assert torch.allclose(model(ids).logits, expected, rtol=0, atol=1e-5)


# Jamba and Mamba multiply by the weight of some matrices themselves, and never call their forward.
@pytest.mark.parametrize("name", ["jamba", "mamba", "falcon_mamba", "llama", "gpt2"])
def test_what_a_module_multiplies_by_itself_is_approximated_too(name: str, ids: torch.Tensor) -> None:
    model = make_zoo(name)
    before = trace(model)
    weights = {p: half(p, p.weight(model)) for p in find_projections(wrap(model))}
    with torch.no_grad():
        dense = model(ids, use_cache=False).logits
        with replaced(model, weights):
            expected = model(ids, use_cache=False).logits
        with approximate(model, half) as records:
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=1e-5)
            with records.suspended():
                assert torch.equal(model(ids, use_cache=False).logits, dense)
    assert not torch.allclose(expected, dense, rtol=0, atol=1e-3)
    assert trace(model) == before


@pytest.mark.parametrize("watch", [approximate, observe])
@pytest.mark.parametrize("name", ["jamba", "mamba", "falcon_mamba"])
def test_what_enters_a_weight_that_no_one_calls_is_recorded(name: str, watch: Any, ids: torch.Tensor) -> None:
    """Errors of `dt_proj`, whose input is the first part of what `x_proj` gives, against float64 products by hand."""
    model = make_zoo(name)
    last = [p for p in find_projections(wrap(model)) if p.module.endswith("dt_proj")][-1]
    place = last.module.rpartition(".")[0]
    mixer: Any = model.get_submodule(place)
    W = last.weight(model)
    E = W.double() - half(last, W).double()
    entering: list[torch.Tensor] = []
    source = mixer.dt_layernorm if name == "jamba" else mixer.x_proj
    with torch.no_grad(), watch(model, {last.name: half(last, W)}) as records:
        handle = source.register_forward_hook(lambda m, a, y: entering.append(y[..., : mixer.time_step_rank]))
        model(ids, use_cache=False)
        handle.remove()
    x = entering[0].double().flatten(0, 1)
    if name == "falcon_mamba":  # normalised in between, without a module
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + mixer.rms_eps)
    record = records[last.name]
    assert record.check is not None
    assert record.check.holds
    assert record.energy == pytest.approx(float((x @ E.T).square().sum()), rel=1e-4)
    if watch is observe:
        assert record.output == pytest.approx(float((x @ W.double().T).square().sum()), rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "gpt_neox"])
def test_records_the_error_against_the_exact_weight(name: str, ids: torch.Tensor) -> None:
    """The recorded worst input is that of a float64 computation from the captured inputs."""
    model = make_tiny(name)
    seen: dict[str, torch.Tensor] = {}
    projections = find_projections(wrap(model))
    handles = [
        model.get_submodule(m).register_forward_pre_hook(lambda mod, args, m=m: seen.__setitem__(m, args[0].detach()))
        for m in {p.module for p in projections}
    ]
    with torch.no_grad(), approximate(model, half) as records:
        model(ids)
    for handle in handles:
        handle.remove()
    for p in projections:
        W, x = p.weight(model).double(), seen[p.module].double()
        error = torch.linalg.vector_norm(x @ (W - half(p, W)).T, dim=-1)
        bound = torch.linalg.matrix_norm(W - half(p, W), 2) * torch.linalg.vector_norm(x, dim=-1)
        worst = int((error / bound).argmax())
        check = records[p.name].check
        assert check is not None
        assert check.error == pytest.approx(float(error.flatten()[worst]), rel=1e-5)
        assert check.bound == pytest.approx(float(bound.flatten()[worst]), rel=1e-3)
        assert check.margin < 1e-3 * check.bound
        # and the difference of the two outputs in the model's own arithmetic agrees, up to its rounding
        y, y2 = (x.float() @ A.float().T for A in (W, half(p, W)))
        gap = torch.linalg.vector_norm((y - y2).double(), dim=-1).flatten()[worst]
        assert float(gap) == pytest.approx(check.error, rel=1e-3)


def test_planted_fault_a_residual_scaled_after_its_norm_was_taken(ids: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    name = find_projections(wrap(model))[7].name

    def scaled(p: Projection, W: torch.Tensor) -> Any:
        found = approximation(W, half(p, W))
        if p.name == name:
            found.weight.copy_(W - 1.01 * (W - found.weight))
        return found

    with torch.no_grad(), approximate(model, scaled) as records:
        model(ids)
    bad = [c for record in records.values() for c in record.checks if not c.holds]
    assert [c.matrix for c in bad] == [name]
    assert bad[0].ratio == pytest.approx(1.01, rel=2e-4)


def test_planted_fault_a_norm_of_the_weight_too_small(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    chosen = {p.name: approximation(p.weight(model), p.weight(model)) for p in find_projections(wrap(model))}
    name = list(chosen)[3]
    chosen[name] = type(chosen[name])(**{**vars(chosen[name]), "weight_norm": chosen[name].weight_norm * 0.99})
    with torch.no_grad(), approximate(model, chosen, cache_radius=0.5) as records:
        model(ids)
    assert [c.matrix for r in records.values() for c in r.checks if not c.holds] == [name]


def test_cache_answers_with_the_earliest_input_within_its_radius() -> None:
    layer = nn.Linear(4, 3)
    p = Projection("m", 0, "m", None, None, "m", "weight", 0, 3, False)
    record = Record(p, approximation(layer.weight, layer.weight))
    wrapped = ApproxLinear(layer, [record], radius=0.1)
    x = torch.tensor([[[1.0, 0, 0, 0], [1.05, 0, 0, 0], [0, 1, 0, 0], [1.12, 0, 0, 0], [0, 1, 0.01, 0]]])
    with torch.no_grad():
        y, exact = wrapped(x), layer(x)
    assert record.hits == 3  # 1.12 is further than a tenth from 1, and so takes 1.05
    for token, answered in enumerate([0, 0, 2, 1, 2]):
        torch.testing.assert_close(y[0, token], exact[0, answered])
    assert record.check is not None
    assert record.check.theorem == "retrieval_bound"
    assert record.check.holds


def test_gpt2_small_has_the_matrices_of_the_paper() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    model = model.to_empty(device="cpu")
    projections = find_projections(wrap(model))
    assert len(projections) == 468
    assert len(groups(projections)) == 72
    of_layer = [p for p in projections if p.layer == 4]
    assert len(of_layer) == 39
    shapes = {p.component: tuple(p.weight(model).shape) for p in of_layer}
    assert shapes == {
        "attn.c_attn.q": (64, 768),
        "attn.c_attn.k": (64, 768),
        "attn.c_attn.v": (64, 768),
        "attn.c_proj": (768, 768),
        "mlp.c_fc": (3072, 768),
        "mlp.c_proj": (768, 3072),
    }
    assert not any("wte" in p.name or "lm_head" in p.name for p in projections)


@pytest.mark.parametrize("name", [n for n in TINY if n in ("gpt2", "gpt_neox", "phi3")])
def test_fused_parts_are_the_queries_keys_and_values(name: str, ids: torch.Tensor) -> None:
    """Zeroing the values of all heads leaves the attention nothing to add; zeroing queries does not."""
    model = make_tiny(name)
    projections = find_projections(wrap(model))
    assert {p.component.rpartition(".")[2] for p in projections if ":" in p.name} >= {"q", "k", "v"}
    covered = {}
    for p in projections:
        covered.setdefault(p.module, []).append((p.start, p.stop))
    for module, parts in covered.items():
        weight: Any = model.get_submodule(module).weight
        rows = weight.shape[1] if projections[0].transposed and weight.ndim == 2 else weight.shape[0]
        parts.sort()
        assert [a for a, _ in parts] == [0, *(b for _, b in parts[:-1])]
        assert parts[-1][1] == rows

    # With equal keys for all tokens, attention is a plain mean: it no longer sees the queries.
    key_bias_free = make_tiny(name)
    with torch.no_grad():
        for n, parameter in key_bias_free.named_parameters():
            if n.endswith("bias"):
                parameter.zero_()
    zero_k = lambda p, W: torch.zeros_like(W) if p.component.endswith(".k") else None  # noqa: E731
    zero_kq = lambda p, W: torch.zeros_like(W) if p.component.endswith((".k", ".q")) else None  # noqa: E731
    with torch.no_grad():
        with approximate(key_bias_free, zero_k):
            a = key_bias_free(ids).logits
        with approximate(key_bias_free, zero_kq):
            b = key_bias_free(ids).logits
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
        assert not torch.allclose(a, key_bias_free(ids).logits, atol=1e-2)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_experts_of_one_parameter_are_checked_on_their_tokens_and_probed(model_type: str, ids: torch.Tensor) -> None:
    model = moe(model_type)
    model.set_experts_implementation("eager")  # as they run while they are watched
    experts = [p for p in find_projections(wrap(model)) if p.expert is not None]
    assert len(experts) == 3 * 2 * 4
    before, dense = trace(model), model(ids).logits
    with torch.no_grad(), approximate(model, lambda p, W: half(p, W) if p.expert is not None else None) as records:
        changed = model(ids).logits
    assert trace(model) == before
    twin = moe(model_type)
    twin.set_experts_implementation("eager")
    with torch.no_grad():
        for p in experts:
            p.weight(twin).copy_(half(p, p.weight(model)))
        assert torch.equal(changed, twin(ids).logits)
    assert not torch.equal(changed, dense)
    assert violations(records) == []
    assert all(r.probe is not None and r.probe.ratio > 0.9999 for r in records.values())
    tokens = [sum(r.check.inputs for p in experts if p.layer == layer and p.component.endswith("down_proj")
                  if (r := records[p.name]).check is not None) for layer in range(3)]  # fmt: skip
    assert tokens == [2 * ids.numel()] * 3

    def scaled(p: Projection, W: torch.Tensor) -> Any:
        found = approximation(W, half(p, W))
        if p == experts[5]:
            found.weight.copy_(W - 1.01 * (W - found.weight))
        return found

    with approximate(model, scaled) as records:
        pass
    assert [c.matrix for r in records.values() for c in r.checks if not c.holds] == [experts[5].name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("radius", [0.0, 0.5])
def test_other_dtypes_hold_their_bounds(dtype: torch.dtype, radius: float, ids: torch.Tensor) -> None:
    model = make_tiny("llama").to(dtype)
    with torch.no_grad(), approximate(model, half, cache_radius=radius) as records:
        assert model(ids).logits.dtype == dtype
    assert violations(records) == []


def test_generation_with_a_cache_of_keys_runs_through(ids: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    with torch.no_grad(), approximate(model, half) as records:
        model.generate(ids[:1, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert violations(records) == []


def test_a_module_that_does_more_than_multiply_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = make_tiny("llama")
    mlp: Any = wrap(model).layers[2].mlp
    mlp.down_proj = Doubled(48, 32)
    with pytest.raises(LyapunovPruneError, match=r"layers\.2\.mlp\.down_proj \(Doubled\) does more than multiply"):
        find_projections(wrap(model))


def test_bad_input_is_refused(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    name = find_projections(wrap(model))[0].name
    W = find_projections(wrap(model))[0].weight(model)
    for chosen, message in (
        ({"nothing": W}, "nothing .* fits no matrix"),
        ({name: W[1:]}, "shape"),
        ({name: W * float("nan")}, "NaN"),
    ):
        with pytest.raises(LyapunovPruneError, match=message), approximate(model, chosen):
            pass
    for radius in (-0.1, 1.0):
        with (
            pytest.raises(LyapunovPruneError, match=f"cache_radius is {radius}"),
            approximate(model, {}, cache_radius=radius),
        ):
            pass


@pytest.mark.parametrize("lower", ["older setting", "setting of a backend"])
def test_low_precision_products_are_refused(lower: str, ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    if lower == "older setting":
        torch.set_float32_matmul_precision("medium")
    elif not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has older settings alone")
    else:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(LyapunovPruneError, match="precision"), approximate(model, half):
            model(ids)
    finally:
        torch.set_float32_matmul_precision("highest")
    with approximate(model, half):
        model(ids)


@pytest.mark.parametrize("radius", [0.0, 0.5])
def test_margins_are_of_the_products_that_were_rounded(radius: float, ids: torch.Tensor) -> None:
    """ε (n + 16) of ‖E‖_F ‖x‖, and of ‖W‖_F ‖x − x'‖ where a cache answered; what underflows; 2⁻³⁷ of the bound."""
    model = make_tiny("llama")
    name = "model.layers.2.mlp.down_proj"
    W = next(p for p in find_projections(wrap(model)) if p.name == name).weight(model).detach().clone()
    x = inputs_of(model, ids[:1])[name]  # of the dense model: nothing before it is changed
    (m, n), sizes = W.shape, x.norm(dim=-1)
    underflow = 2.0**-148 * n * (1 + float(sizes.max())) * m**0.5
    with approximate(model, {name: W}, cache_radius=0.0) as records:
        model(ids[:1])
    check = records[name].check
    assert check is not None
    assert (check.error, check.bound, check.inputs) == (0, 0, len(x))
    assert check.margin == pytest.approx(underflow, rel=1e-6, abs=0)
    with approximate(model, {name: torch.zeros_like(W)}, cache_radius=radius) as records:
        model(ids[:1])
    record = records[name]
    assert record.check is not None
    frobenius = float(W.double().norm())
    if radius == 0:
        eps = 2.0**-23
        steps = record.check.margin - underflow - 2.0**-37 * record.check.bound
        size = record.check.bound / record.approximation.total_norm
        assert size == pytest.approx(float(sizes[(sizes - size).abs().argmin()]), rel=1e-5)
        assert steps == pytest.approx(eps * (n + 16) * frobenius * size, rel=1e-5, abs=0)
        assert record.weight_probe is None
    else:
        assert record.weight_probe is not None
        assert record.weight_probe.margin == pytest.approx(record.probe.margin, rel=1e-6, abs=0)  # type: ignore[union-attr]
    assert record.probe is not None
    rounding = frobenius * (2.0**-23 + 2.0**-40) + 2.0**-148 * (m * n) ** 0.5
    assert record.probe.margin == pytest.approx(rounding + 2.0**-37 * record.probe.bound, rel=1e-6, abs=0)


def test_a_difference_of_matrices_is_certified_with_room_for_its_rounding() -> None:
    W, S = rand(6, 9, seed=1), rand(6, 9, seed=2)
    assert certify_difference(W, S).bound == pytest.approx(certify(W - S).bound * (1 + 2.0**-36), rel=1e-15)
    assert certify_difference(W, S).bound > certify(W - S).bound


def test_stages_that_do_nothing_leave_all_to_the_other() -> None:
    W, S = rand(6, 9, seed=1), rand(6, 9, seed=2)
    norm = certify_difference(W, S).bound
    one, low, both = approximation(W, S), approximation(W, S, sparse=W), approximation(W, S, sparse=(W + S) / 2)
    assert (one.sparse_norm, one.low_rank_norm, one.total_norm) == (norm, 0, norm)
    assert (low.sparse_norm, low.low_rank_norm, low.total_norm) == (0, norm, norm)
    assert both.sparse_norm == pytest.approx(norm / 2, rel=1e-9)
    assert both.low_rank_norm == pytest.approx(norm / 2, rel=1e-9)
    assert both.weight_norm == one.weight_norm == certify(W).bound


def test_a_cache_answers_window_by_window_up_to_its_radius() -> None:
    """Tokens on a line, 1 apart: the earliest no further than 0.103 t answers token t."""
    x = torch.arange(1.0, 41.0).view(2, 20, 1).clone()
    x[1] = 100 + torch.arange(20.0).view(20, 1)
    used, distance, radius = _look_up(x, 0.103)
    for window in range(2):
        for t in range(20):
            own = float(x[window, t, 0])
            near = [s for s in range(t + 1) if own - float(x[window, s, 0]) <= 0.103 * own * (1 - 1e-6)]
            assert used[window, t, 0] == x[window, near[0], 0]
            assert distance[window, t] == pytest.approx(own - float(x[window, near[0], 0]))
            assert radius[window, t] == pytest.approx(0.103 * own)
