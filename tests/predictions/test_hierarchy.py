"""One layer changed while the dense model decodes: against real cached decoding, in float64, by the definitions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    LAYERS,
    assert_same,
    bits,
    directions_by_definition,
    hooks_of,
    leave,
    make_other,
    make_tiny,
    other_head,
    predictions_by_definition,
    turned,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from experiments.hierarchies import without_branches
from lyapunov_prune import LyapunovPruneError, NonFiniteError, compress, probe_layers
from lyapunov_prune.forward.anatomy import find_anatomy
from lyapunov_prune.forward.changes import WHAT
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.predictions import HierarchyProbe
from lyapunov_prune.predictions import hierarchy as module
from lyapunov_prune.predictions import spaces as softmax_module
from lyapunov_prune.predictions.hierarchy import ROUNDING, angle_bounds, probability_angle_bounds
from lyapunov_prune.predictions.spaces import HIDDEN, LOGITS
from lyapunov_prune.results.result import ROWS

STEPS, LAYER, T = 5, 2, 1.7
# Where each model keeps its layers, its final norm, and the ends of both branches.
PARTS = {
    "llama": ("model.layers", "model.norm", "self_attn", "self_attn.o_proj", "mlp.down_proj"),
    "gpt2": ("transformer.h", "transformer.ln_f", "attn", "attn.c_proj", "mlp.c_proj"),
    "gemma2": ("model.layers", "model.norm", "self_attn", "post_attention_layernorm", "post_feedforward_layernorm"),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Several chunks of tokens, several blocks in each, the last of each smaller."""
    monkeypatch.setattr(softmax_module, "_CHUNK", 97 * 4)
    monkeypatch.setattr(softmax_module, "BLOCK", 97 * 3)
    with torch.no_grad():
        yield


@pytest.fixture
def prompts(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, :7]


def make_double(name: str) -> PreTrainedModel:
    if name == "gemma2":
        return other_head("gemma2", query_pre_attn_scalar=8, final_logit_softcapping=2.0).double()
    return make_tiny(name).double()


def changed_by_hand(model: PreTrainedModel, name: str, what: str, compressed: PreTrainedModel | None) -> Any:
    """A twin with layer LAYER changed: other weights, or none where the branch ends."""
    twin: Any = copy.deepcopy(model)
    layers, _, attention, *ends = PARTS[name]
    layer = twin.get_submodule(f"{layers}.{LAYER}")
    if compressed is not None:
        for key, parameter in layer.named_parameters():
            in_attention = key.startswith(f"{attention}.")
            if what == "layer" or (what == "attention") == in_attention:
                parameter.copy_(compressed.get_submodule(f"{layers}.{LAYER}").get_parameter(key))
    elif what == "layer":
        layer.forward = lambda hidden, *args, **kwargs: hidden
    else:
        layer.get_submodule(ends[what == "mlp"]).register_forward_hook(lambda m, args, output: 0 * output)
    return twin


def decoded(twin: Any, name: str, prompts: torch.Tensor, following: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """h and z at each step of a real decoding with a cache: prompts × steps × width."""
    layers, norm, *_ = PARTS[name]
    states: list[torch.Tensor] = []
    hook = lambda m, args, output: states.append(output[:, -1])  # noqa: E731
    twin.get_submodule(f"{layers}.{LAYER}").register_forward_hook(hook)
    output = twin(prompts, use_cache=True)
    for step in range(STEPS - 1):
        output = twin(following[:, step : step + 1], past_key_values=output.past_key_values, use_cache=True)
    h = torch.stack(states, dim=1)
    z = twin.get_output_embeddings()(twin.get_submodule(norm)(h))
    if name == "gemma2":
        z = 2 * torch.tanh(z / 2)
    return h.numpy(), z.numpy()


def exact(
    model: PreTrainedModel, family: str, what: str, prompts: torch.Tensor, compressed: PreTrainedModel | None
) -> dict[str, np.ndarray]:
    """Every measure of LAYER, means over prompts."""
    text = prompts
    for _ in range(STEPS):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    following = text[:, prompts.shape[1] :]
    h, z = decoded(copy.deepcopy(model), family, prompts, following)
    h2, z2 = decoded(changed_by_hand(model, family, what, compressed), family, prompts, following)
    found = directions_by_definition(h, h2 - h)
    found |= dict(zip(LOGITS, directions_by_definition(z, z2 - z).values(), strict=True))
    found |= predictions_by_definition(z, z2 - z, T)
    c = found["deviation"]
    found["range_bound"] = found.pop("span")
    found["variance_bound"] = np.where(c <= 1, (1 / 2 + 2 * c / 9) * 2 * found["kl_estimate"], np.nan)
    for name in ("deviation", "deviation_r"):
        found[name] = np.broadcast_to(found[name].max(0), c.shape)
    return {key: values.mean(0) for key, values in found.items()}


def assert_agree(found: HierarchyProbe, i: int, wanted: dict[str, np.ndarray], rtol: float = 1e-7) -> None:
    for key, values in wanted.items():
        np.testing.assert_allclose(getattr(found, key)[i, LAYER], values, rtol=rtol, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("change", ["dropped", "compressed"])
@pytest.mark.parametrize("name", list(PARTS))
def test_measures_are_those_of_real_decoding(name: str, change: str, prompts: torch.Tensor) -> None:
    model = make_double(name)
    compressed = compress(model, method="magnitude", sparsity=0.1).model if change == "compressed" else None
    before = {key: p.clone() for key, p in model.named_parameters()}
    found = probe_layers(model, prompts, change=compressed or "dropped", steps=STEPS, temperature=T, batch_size=2)
    for i, what in enumerate(WHAT):
        # Gemma takes its norms in float32 whatever the dtype of its weights.
        wanted = exact(model, name, what, prompts, compressed)
        assert_agree(found, i, wanted, rtol=1e-3 if name == "gemma2" else 1e-7)
    assert found.violations == ()
    assert found.checked >= 3 * LAYERS * len(prompts) * STEPS
    assert hooks_of(model) == 0
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())


def test_a_violated_bound_is_counted_and_named(
    prompts: torch.Tensor, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = module.kl_softmax_le_range
    monkeypatch.setattr(module, "kl_softmax_le_range", lambda kl, span, **more: whole(kl, 1e-3 * span, **more))
    found = probe_layers(llama, prompts, steps=2, what=("mlp",))
    assert len(found.violations) == LAYERS
    assert f"{LAYERS} VIOLATED" in str(found)
    assert f"{LAYERS} of its bounds VIOLATED" in found.headline()
    assert "kl_softmax_le_range is VIOLATED by mlp of layer 5" in found.headline()


def test_every_family_is_probed(family: str, prompts: torch.Tensor) -> None:
    """Against hooks on the whole forward: the state of the next boundary without a layer, and no bound violated."""
    model = make_tiny(family).double()
    found = probe_layers(model, prompts[:1], steps=2)
    assert found.violations == ()
    assert np.isfinite(found.kl).all()
    assert (found.kl[0] > 0).all()
    # The last layer's state is what the head reads: dropping it is what skipping it does to the logits.
    structure, ids = find_structure(model), prompts[:1]
    z = model(ids, use_cache=False).logits[:, -1].numpy()
    with skipped(structure, (LAYERS - 1,)):
        z2 = model(ids, use_cache=False).logits[:, -1].numpy()
    np.testing.assert_allclose(found.kl[0, -1, 0], predictions_by_definition(z, z2 - z, 1.0)["kl"][0], rtol=1e-6)


def test_where_no_forward_can_begin_it_begins_before(prompts: torch.Tensor) -> None:
    wanted, model = make_tiny("llama"), make_tiny("llama")
    leave(model, 1, 4, taken=False)
    found = probe_layers(model, prompts, steps=2)
    # Layer 4 adds what layer 1 left: more than the same layer of the plain model does.
    plain = probe_layers(wanted, prompts, steps=2)
    np.testing.assert_allclose(found.kl[:, :4, 0], plain.kl[:, :4, 0], rtol=1e-3, atol=1e-6)
    assert (np.abs(found.kl[0, 4] / plain.kl[0, 4] - 1) > 0.01).all()


def test_a_layer_without_an_mlp_has_none_to_leave_out(prompts: torch.Tensor) -> None:
    config = AutoConfig.for_model("mamba", vocab_size=97, hidden_size=32, num_hidden_layers=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    found = probe_layers(model, prompts, steps=2, what=("mlp", "attention", "layer"))
    assert np.isnan(found.kl[0]).all()
    assert np.isfinite(found.kl[1:]).all()
    np.testing.assert_array_equal(found.kl[1], found.kl[2])


def test_the_same_weights_change_nothing(prompts: torch.Tensor, llama: PreTrainedModel) -> None:
    found = probe_layers(llama, prompts, change=copy.deepcopy(llama), steps=2)
    for name in ("hidden", "logit", "kl", "kl_estimate", "range_bound", "variance_bound"):
        assert np.all(getattr(found, name) == 0), name


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@pytest.mark.parametrize("name", ["gpt_neox", "opt", "phi", "cohere"])
def test_each_matrix_is_replaced_with_its_branch(name: str, kind: str, prompts: torch.Tensor) -> None:
    """Parallel branches, with a norm of their own or a shared one, and an MLP of bare matrices."""
    model = make_other(name) if name in ("phi", "cohere") else make_tiny(name)
    other = copy.deepcopy(model)
    for p in find_projections(wrap(other)):
        if ("att" in p.module) == (kind == "attention"):
            p.weight(other).mul_(0.5)
    found = probe_layers(model, prompts[:1], change=other, steps=2)
    whole, mine, others = found.kl[[0, WHAT.index(kind), 3 - WHAT.index(kind)]]
    assert (others == 0).all()
    assert (mine > 0).all()
    np.testing.assert_array_equal(whole, mine)


@pytest.mark.parametrize("name", ["gpt2", "opt", "phi"])
def test_a_branch_that_is_zero_is_one_that_is_gone(name: str, prompts: torch.Tensor) -> None:
    """Its output projection lost the bias too; the layers between keep theirs, and nothing of the model is changed."""
    model = make_other(name) if name == "phi" else make_tiny(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_()
    zeroed = without_branches(model, (0,), (1,))
    before = bits(model)
    found = probe_layers(model, prompts, change=zeroed, steps=3)
    assert_same(model, before)
    wanted = probe_layers(model, prompts, steps=3)
    for layer, part in ((0, 1), (1, 2)):
        np.testing.assert_allclose(found.kl[part, layer], wanted.kl[part, layer], rtol=1e-4)
        np.testing.assert_allclose(found.kl[0, layer], found.kl[part, layer], rtol=1e-4)
    found.kl[[0, 0, 1, 2], [0, 1, 0, 1]] = 0
    assert not found.kl.any()
    end = next(p for key, p in zeroed.named_parameters() if key.endswith("bias") and not p.any())
    end += 1
    with pytest.raises(LyapunovPruneError, match=r"another .*bias"):
        probe_layers(model, prompts, change=zeroed, steps=3)


def test_a_change_that_overflows_has_no_numbers_and_no_alarm(prompts: torch.Tensor) -> None:
    model = make_tiny("llama")
    other = copy.deepcopy(model)
    structure = find_structure(other)
    structure.layers[3].mlp.down_proj.weight.fill_(torch.inf)  # type: ignore[union-attr, operator]
    found = probe_layers(model, prompts, change=other, steps=2)
    bad = np.isnan(found.kl).all(-1)
    assert bad[:, 3].tolist() == [True, False, True]
    assert bad.sum() == 2
    assert found.violations == ()


def test_vocabulary_sized_tensors_are_chunks_and_the_dense_ones_are_made_once(
    prompts: torch.Tensor, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    logits = Scorer.logits
    monkeypatch.setattr(Scorer, "logits", lambda self, state: rows.append(len(state)) or logits(self, state))
    probe_layers(llama, prompts[:1], steps=10)
    assert rows == [4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 2, 2] * LAYERS


def test_frame_and_summary(prompts: torch.Tensor, llama: PreTrainedModel) -> None:
    found = probe_layers(llama, prompts, steps=3, what=("layer", "mlp"))
    frame = found.to_frame()
    assert len(frame) == 2 * LAYERS * 3
    row = frame[(frame.layer == 4) & (frame.what == "mlp") & (frame.step == 1)].iloc[0]
    assert row.kl == found.kl[1, 4, 1]
    summary = found.summary()
    assert list(summary.layer) == [k for k in range(LAYERS) for _ in range(2)]
    assert summary.kl[9] == pytest.approx(found.kl[1, 4].mean())
    assert summary.within[9] == np.isfinite(found.variance_bound[1, 4]).mean()
    assert set(HIDDEN) < set(frame)
    assert found.brief().kl.tolist() == sorted(summary.kl, reverse=True)[:ROWS]


def test_what_cannot_be_probed_is_said(prompts: torch.Tensor, llama: PreTrainedModel) -> None:
    for more, told in (
        ({"temperature": 0.0}, "temperature is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 123}, "longer than the model's 128"),
        ({"what": ("head",)}, "what is .*head"),
        ({"what": ()}, r"what is \(\)"),
        ({"change": "skipped"}, "change is 'skipped'"),
        ({"change": make_tiny("gpt2")}, "has other layers"),
    ):
        with pytest.raises(LyapunovPruneError, match=told):
            probe_layers(llama, prompts, **more)
    healed = copy.deepcopy(llama)
    norm: nn.Parameter = find_structure(healed).layers[2].input_layernorm.weight  # type: ignore[union-attr, assignment]
    norm.mul_(2)
    with pytest.raises(LyapunovPruneError, match=r"another model\.layers\.2\.input_layernorm\.weight"):
        probe_layers(llama, prompts, change=healed)
    broken = make_tiny("llama")
    find_structure(broken).layers[1].mlp.down_proj.weight.fill_(torch.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(NonFiniteError):
        probe_layers(broken, prompts, steps=2)


# What the stream enters behind the attention.
BEHIND = {"llama": "post_attention_layernorm", "gpt2": "ln_2", "gemma2": "pre_feedforward_layernorm"}


def entering(twin: Any, name: str, text: torch.Tensor) -> torch.Tensor:
    """The stream behind the attention of LAYER, at the last STEPS tokens of `text`."""
    found: list[torch.Tensor] = []
    place = find_structure(twin).layers[LAYER].get_submodule(BEHIND[name])
    hook = place.register_forward_pre_hook(lambda m, args: found.append(args[0]))
    twin(text, use_cache=False)
    hook.remove()
    return found[0][:, -STEPS:]


@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("change", ["dropped", "compressed"])
@pytest.mark.parametrize("name", list(BEHIND))
@torch.no_grad()
def test_an_attention_is_read_before_the_mlp_has_run(
    name: str, change: str, final_norm: bool, prompts: torch.Tensor
) -> None:
    model = make_double(name)
    compressed = compress(model, method="magnitude", sparsity=0.1).model if change == "compressed" else None
    found = probe_layers(
        model,
        prompts,
        change=compressed or "dropped",
        steps=STEPS,
        temperature=T,
        read_at="branch",
        final_norm=final_norm,
        batch_size=2,
    )
    text = prompts
    for _ in range(STEPS - 1):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    h = entering(model, name, text)
    h2 = entering(changed_by_hand(model, name, "attention", compressed), name, text)
    norm = model.get_submodule(PARTS[name][1]) if final_norm else torch.nn.Identity()
    z, z2 = (model.get_output_embeddings()(norm(x)) for x in (h, h2))
    if name == "gemma2":
        z, z2 = (2 * torch.tanh(x / 2) for x in (z, z2))
    h, h2, z, z2 = (x.numpy() for x in (h, h2, z, z2))
    wanted = directions_by_definition(h, h2 - h)
    wanted |= dict(zip(LOGITS, directions_by_definition(z, z2 - z).values(), strict=True))
    measures = predictions_by_definition(z, z2 - z, T)
    wanted |= {key: measures[key] for key in ("probability", "kl", "kl_estimate", "uniform_variance")}
    i = found.what.index("attention")
    for key, values in wanted.items():
        mine = getattr(found, key)[i, LAYER]
        # Gemma takes its norms in float32 whatever the dtype of its weights.
        np.testing.assert_allclose(mine, values.mean(0), rtol=1e-3 if name == "gemma2" else 1e-7, atol=1e-12)
    assert (found.read_at, found.final_norm) == ("branch", final_norm)
    assert f"where the branch ends, logits with{'' if final_norm else 'out'} the final norm" in found.headline()
    assert hooks_of(model) == 0


@torch.no_grad()
def test_what_ends_with_the_layer_is_read_there(prompts: torch.Tensor) -> None:
    model = make_double("llama")
    layer, branch = (probe_layers(model, prompts, steps=STEPS, read_at=at) for at in ("layer", "branch"))
    for part in ("layer", "mlp"):
        i = layer.what.index(part)
        np.testing.assert_allclose(branch.hidden[i], layer.hidden[i], rtol=1e-9)
        np.testing.assert_allclose(branch.kl[i], layer.kl[i], rtol=1e-9)
    i = layer.what.index("attention")
    assert (np.abs(branch.hidden[i] / layer.hidden[i] - 1) > 0.01).any()
    alone = probe_layers(model, prompts, steps=STEPS, read_at="branch", what=("attention",))
    np.testing.assert_allclose(alone.kl[0], branch.kl[i], rtol=1e-9)


def test_every_family_is_read_behind_its_branches_or_says_why_not(family: str, prompts: torch.Tensor) -> None:
    model = make_tiny(family)
    if any(found.parallel for found in find_anatomy(wrap(model), range(LAYERS)).values()):
        with pytest.raises(LyapunovPruneError, match="side by side"):
            probe_layers(model, prompts, read_at="branch")
        return
    found = probe_layers(model, prompts, steps=2, read_at="branch")
    assert np.isfinite(found.kl[found.what.index("layer")]).all()
    assert not found.violations


def test_another_place_is_refused(prompts: torch.Tensor) -> None:
    anywhere: Any = "norm"
    with pytest.raises(LyapunovPruneError, match="'norm'"):
        probe_layers(make_tiny("llama"), prompts, read_at=anywhere)


SOME_LOGITS = arrays(np.float64, (3, 7), elements=st.floats(-8, 8))
ROUND = 1e-12  # of an angle that is computed as 1 − cos


def parts(v: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    along = (v * delta).sum(-1, keepdims=True) * v / (v * v).sum(-1, keepdims=True)
    size = np.linalg.norm(v, axis=-1)
    return np.linalg.norm(along, axis=-1) / size, np.linalg.norm(delta - along, axis=-1) / size


def drawn(seed: int, size: float) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    v, delta = generator.normal(size=(2, 500, 6))
    v /= np.linalg.norm(v, axis=-1, keepdims=True)
    return v, delta * size / np.linalg.norm(delta, axis=-1, keepdims=True)


@pytest.mark.parametrize("size", [1e-3, 0.1, 0.5, 0.9, 0.999, 1.0, 3.0])
def test_the_angle_of_a_vector_lies_within_its_bounds(size: float) -> None:
    for seed in range(5):
        v, delta = drawn(seed, size)
        a, b = parts(v, delta)
        low, high = angle_bounds(a, b)
        inside = a < 1
        assert inside.any()
        assert np.isnan(high[~inside]).all()
        angle = turned(v, v + delta)[inside]
        assert (angle <= high[inside] * (1 + ROUNDING) + ROUND).all()
        assert (angle >= low[inside] * (1 - ROUNDING) - ROUND).all()


def test_a_vector_turned_beyond_a_right_angle_is_outside_the_range() -> None:
    """Δ = −2v and a little across: the formula would say that next to nothing turned."""
    v = np.array([[1.0, 0.0]])
    delta = np.array([[-3.0, 0.1]])
    a, b = parts(v, delta)
    assert a[0] > 1
    formula = b**2 / (2 * (1 - a) ** 2)
    assert turned(v, v + delta)[0] > 100 * formula[0]
    assert np.isnan(angle_bounds(a, b)[1]).all()


@settings(max_examples=300)
@given(SOME_LOGITS, SOME_LOGITS, st.floats(1e-3, 4))
def test_the_angle_of_probabilities_lies_within_its_bounds(z: np.ndarray, dz: np.ndarray, scale: float) -> None:
    made = predictions_by_definition(z, scale * dz / 4, 1.0)
    low, high = probability_angle_bounds(2 * made["probability_estimate"], made["deviation_r"])
    assert (made["probability"] <= high * (1 + ROUNDING) + ROUND).all()
    assert (made["probability"] >= low * (1 - ROUNDING) - ROUND).all()
    assert (high <= 1).all()


def test_a_deviation_that_is_too_small_is_outside_the_range() -> None:
    """Planted fault: half of c, and the deviation under p in the place of that under r."""
    generator = np.random.default_rng(0)
    z, dz = generator.normal(size=(2, 2000, 5)) * [[[2.0]], [[1.5]]]
    made = predictions_by_definition(z, dz, 1.0)
    V, c = 2 * made["probability_estimate"], made["deviation_r"]
    assert (made["probability"] <= probability_angle_bounds(V, c)[1] + ROUND).all()
    assert (made["probability"] > probability_angle_bounds(V, 0 * c)[1] + ROUND).any()
    assert (made["probability"] < probability_angle_bounds(V, 0 * c)[0] - ROUND).any()


def test_both_are_the_estimates_where_the_change_is_small() -> None:
    for size in (1e-1, 1e-2, 1e-3):
        v, delta = drawn(0, size)
        a, b = parts(v, delta)
        for bound in angle_bounds(a, b):
            assert np.abs(bound / (b**2 / 2) - 1).max() < 3 * size
        z, dz = np.random.default_rng(1).normal(size=(2, 50, 9))
        made = predictions_by_definition(z, size * dz, 1.0)
        c = made["deviation_r"]
        for bound in probability_angle_bounds(2 * made["probability_estimate"], c):
            assert (np.abs(bound / made["probability_estimate"] - 1) < 3 * c + c**2).all()


def test_a_huge_deviation_bounds_nothing_and_does_not_overflow() -> None:
    low, high = probability_angle_bounds(np.array([1e4, 0.0]), np.array([1e6, 1e6]))
    assert low.tolist() == [0.0, 0.0]
    assert high.tolist() == [1.0, 0.0]


def test_a_probe_holds_its_angles_against_them(llama: PreTrainedModel) -> None:
    prompts = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(0))
    for change in ("dropped", compress(llama, method="rtn", bits=8).model):
        found = probe_layers(llama, prompts, steps=3, change=change)
        assert found.exceeded == 0
        assert found.derived > found.kl.size
        assert f"0 of {found.derived} angles above the bounds derived" in found.headline()
        for space in ("hidden", "logit", "probability"):
            angle, bound = getattr(found, space), getattr(found, f"{space}_bound")
            known = np.isfinite(bound)
            assert (angle[known] <= bound[known] * (1 + ROUNDING)).all()
