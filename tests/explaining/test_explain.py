"""Where an error comes from, against copies of the models with layers exchanged by hand, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hooks_of, inputs_of, make_tiny, moe, operated, saved
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

import lyapunov_prune as lp
from lyapunov_prune.bounds import approximation as approx_module
from lyapunov_prune.bounds.matrix_errors import MatrixErrors
from lyapunov_prune.checkpoints import layer_stream
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.explaining import Explanation
from lyapunov_prune.explaining import explain as module
from lyapunov_prune.explaining.explain import READINGS, explain, forwards, told_cost
from lyapunov_prune.explaining.pair import Side
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.forward import states
from lyapunov_prune.forward.prefix import Prefix
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import find_structure

CLOSE = {"rtol": 2e-5, "atol": 1e-9}  # transformers takes norms in float32 inside a float64 model


def perturbed(model: PreTrainedModel, size: float = 0.05, seed: int = 3) -> PreTrainedModel:
    """A copy with noise on every matrix of every layer, the embedding and the head."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim >= 2:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(size * parameter.std() * noise)
    return other


def tiny(name: str) -> PreTrainedModel:
    model = moe("mixtral") if name == "moe" else make_tiny(name)
    if name == "moe":
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model.double()


def exchanged(model: PreTrainedModel, layers: dict[int, nn.Module]) -> PreTrainedModel:
    """A copy of `model` with copies of other layers in these places."""
    other = copy.deepcopy(model)
    for index, layer in layers.items():
        find_structure(other).layers[index] = copy.deepcopy(layer)
    return other


def first_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def run(model: PreTrainedModel, ids: torch.Tensor) -> tuple[list[np.ndarray], np.ndarray]:
    """The states at every boundary, by plain hooks, and `log softmax` of the predicting positions."""
    layers, states = find_structure(model).layers, list[torch.Tensor]()
    hooks = [layers[0].register_forward_pre_hook(lambda m, args: states.append(args[0]))]
    hooks += [layer.register_forward_hook(lambda m, args, out: states.append(first_of(out))) for layer in layers]
    logits = model(ids, use_cache=False).logits[:, :-1]
    for hook in hooks:
        hook.remove()
    return [h.double().numpy().copy() for h in states], logits.double().log_softmax(-1).numpy()


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def loss(q: np.ndarray, ids: torch.Tensor) -> float:
    return float(-np.take_along_axis(q, ids[:, 1:, None].numpy(), -1).mean())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "moe", "opt"])
def test_both_blames_and_the_parts_are_those_of_exchanged_layers(name: str, ids: torch.Tensor) -> None:
    dense = tiny(name)
    other = perturbed(dense)
    found = explain(dense, other, ids, batch_size=2)
    layers, theirs = (find_structure(m).layers for m in (dense, other))
    (h, p), (h2, q) = run(dense, ids), run(other, ids)
    L = len(layers)
    np.testing.assert_allclose(found.kl, kl(p, q), **CLOSE)
    np.testing.assert_allclose([found.dense_loss, found.loss], [loss(p, ids), loss(q, ids)], **CLOSE)
    for k in range(L):
        only, but = exchanged(dense, {k: theirs[k]}), exchanged(other, {k: layers[k]})
        states, changed = run(only, ids)
        back = run(but, ids)[1]
        np.testing.assert_allclose(found.kl_only[k + 1], kl(p, changed), **CLOSE)
        np.testing.assert_allclose(found.kl_but[k + 1], kl(p, back), **CLOSE)
        np.testing.assert_allclose(found.loss_only[k + 1], loss(changed, ids), **CLOSE)
        np.testing.assert_allclose(found.loss_but[k + 1], loss(back, ids), **CLOSE)
        e, out = h2[k] - h[k], h2[k + 1] - h[k + 1]
        parts = e, states[k + 1] - h[k + 1], h2[k + 1] - states[k + 1] - e
        size = np.linalg.norm(out) * np.linalg.norm(h[k + 1])
        np.testing.assert_allclose(found.parts[:, k], [(x * out).sum() / size for x in parts], **CLOSE)
        np.testing.assert_allclose(found.energy[:, k], [(x**2).sum() for x in parts], **CLOSE)
        rho = np.square(parts[2] + e).sum() / np.square(e).sum() * np.square(h[k]).sum() / np.square(h[k + 1]).sum()
        np.testing.assert_allclose(found.rho_of_error[k], rho, **CLOSE)
    np.testing.assert_allclose(found.parts.sum(0), found.relative[1:], rtol=1e-5)
    np.testing.assert_allclose(found.relative[-1], found.relative[0] + (found.parts[1] + found.carried).sum())
    assert found.adds_up
    assert found.off.max() < 1e-6
    assert all(check.holds for check in found.composition)
    assert found.matrices is not None
    require_own_errors(found.matrices, dense, other, ids, set(found.blamed))
    assert hooks_of(dense) == hooks_of(other) == 0


def of_expert(model: Any, p: Projection, ids: torch.Tensor) -> torch.Tensor:
    """What enters a matrix of one of Mixtral's experts: its tokens, or `σ(W_g x) ⊙ (W_u x)` of these."""
    module, calls = model.get_submodule(p.module), []
    handle = module.register_forward_pre_hook(lambda m, args: calls.append(args))
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    x = torch.cat([tokens[(chosen == p.expert).any(1)] for tokens, chosen, _ in calls])
    if p.parameter == "gate_up_proj":
        return x
    gate, up = (x @ module.gate_up_proj[p.expert].detach().T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def require_own_errors(
    found: MatrixErrors, dense: PreTrainedModel, other: PreTrainedModel, ids: torch.Tensor, layers: set[int]
) -> None:
    """Each matrix on what enters it in the dense model, its norm by SVD, all in float64."""
    projections = [p for p in find_projections(wrap(dense)) if p.layer in layers]
    assert found.names == tuple(p.name for p in projections)
    entering = inputs_of(dense, ids)
    for p, error, norm, checks in zip(projections, found.error, found.norm, found.checks, strict=True):
        W, E = p.weight(dense), p.weight(dense) - p.weight(other)
        np.testing.assert_allclose(norm, torch.linalg.matrix_norm(E, 2), rtol=1e-4)  # from above
        assert checks[-1].ratio > 0.9999
        x = entering[p.module] if p.expert is None else of_expert(dense, p, ids)
        own = (x @ E.T).norm(dim=-1)
        np.testing.assert_allclose(error, own.norm() / (x @ W.T).norm(), rtol=1e-6)
        np.testing.assert_allclose(checks[0].ratio, (own / x.norm(dim=-1)).max() / norm, rtol=1e-4)
    assert not found.violations


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_embedding_and_head_are_parts_of_their_own(name: str, ids: torch.Tensor) -> None:
    dense = tiny(name)
    other = perturbed(dense)
    found = explain(dense, other, ids)
    p = run(dense, ids)[1]
    for at, names in ((0, ("embed_tokens", "wte", "wpe")), (-1, ("norm", "ln_f"))):
        for base, giver, values in ((dense, other, found.kl_only), (other, dense, found.kl_but)):
            made, head = copy.deepcopy(base), giver if at else base
            backbones = [find_structure(model).backbone for model in (made, giver)]
            for name in (n for n in names if hasattr(backbones[0], n)):
                setattr(backbones[0], name, copy.deepcopy(getattr(backbones[1], name)))
            made.set_output_embeddings(copy.deepcopy(head.get_output_embeddings()))  # in GPT-2 it is the embedding
            np.testing.assert_allclose(values[at], kl(p, run(made, ids)[1]), **CLOSE)


def test_a_removed_layer_is_the_identity_and_a_mend_belongs_where_it_is_stored(ids: torch.Tensor) -> None:
    dense = tiny("llama")
    pruned = operated(dense, [0, 3])
    with torch.no_grad():
        find_structure(pruned).layers[1].mlp.down_proj.weight.mul_(1.3)  # a mend: layer 2 of the dense model
    found = explain(dense, pruned, ids, kept=(1, 2, 4, 5))
    (h, p), (_, q) = run(dense, ids), run(pruned, ids)
    changed = {k for k in range(6) if found.energy[1, k] > 0}
    assert changed == {0, 2, 3}
    np.testing.assert_allclose(found.energy[1, 3], np.square(h[3] - h[4]).sum(), **CLOSE)
    assert found.kl_only[2] == found.gain[2] == 0  # layer 1 is as it was
    np.testing.assert_allclose(found.kl, kl(p, q), **CLOSE)
    for layer in (0, 3):
        alone = operated(dense, [layer])
        np.testing.assert_allclose(found.kl_only[layer + 1], kl(p, run(alone, ids)[1]), **CLOSE)
    back = operated(dense, [3])  # all but layer 0, with the mend
    with torch.no_grad():
        find_structure(back).layers[2].mlp.down_proj.weight.mul_(1.3)
    np.testing.assert_allclose(found.kl_but[1], kl(p, run(back, ids)[1]), **CLOSE)
    mended = copy.deepcopy(dense)
    with torch.no_grad():
        find_structure(mended).layers[2].mlp.down_proj.weight.mul_(1.3)
    np.testing.assert_allclose(found.kl_only[3], kl(p, run(mended, ids)[1]), **CLOSE)
    assert found.adds_up


def test_a_planted_fault_does_not_add_up(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, true = perturbed(llama), Side.run

    def shifted(self: Side, layer: int, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return true(self, max(layer - 1, 0), ids, hidden)

    assert explain(llama, other, ids).adds_up
    monkeypatch.setattr(Side, "run", shifted)
    found = explain(llama, other, ids)
    assert not found.adds_up
    assert "DO NOT ADD UP" in str(found)


def test_a_norm_that_is_too_small_is_a_violation(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify = approx_module.certify
    monkeypatch.setattr(approx_module, "certify", lambda W: replace(certify(W), bound=certify(W).bound * 0.99))
    found = explain(llama, perturbed(llama), ids)
    assert found.matrices is not None
    assert {check.matrix for check in found.matrices.violations} == set(found.matrices.names)
    assert "VIOLATION" in str(found.matrices)


def test_matrices_of_a_pruned_model_are_those_of_the_same_layer(ids: torch.Tensor) -> None:
    dense = tiny("llama")
    pruned = operated(dense, [0])
    with torch.no_grad():
        find_structure(pruned).layers[1].mlp.down_proj.weight.mul_(1.3)  # layer 2 of the dense model
    found = explain(dense, pruned, ids, kept=(1, 2, 3, 4, 5))
    assert found.matrices is not None
    errors = dict(zip(found.matrices.names, found.matrices.error, strict=True))
    assert not any(name.startswith("model.layers.0.") for name in errors)  # it is gone
    changed = {name: error for name, error in errors.items() if error > 0}
    assert changed == {"model.layers.2.mlp.down_proj": pytest.approx(0.3)}


def numbers(found: Explanation) -> dict[str, np.ndarray]:
    """Every array of a result and of its parts, by name."""
    parts = {"": found, "matrices ": found.matrices, "tokens ": found.tokens}
    return {
        prefix + name: np.asarray(value)
        for prefix, part in parts.items()
        for name, value in vars(part).items()
        if isinstance(value, np.ndarray | float)
    }


@pytest.mark.parametrize(("name", "in_file"), [("llama", True), ("gemma3", False)])
def test_streamed_models_give_the_numbers_of_those_in_memory(
    name: str,
    in_file: bool,
    ids: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_stream, "TOKENS", 1)  # one window after the other goes through a layer
    if in_file:
        monkeypatch.setattr(states, "free_memory", lambda device: 0)
    dense = make_tiny(name)
    other = perturbed(dense)
    saved(dense, tokenizer, tmp_path / "dense")
    pruned = saved(operated(other, [1]), tokenizer, tmp_path / "other")
    kept = tuple(k for k in range(find_structure(dense).num_layers) if k != 1)
    (a, b), streamed = (
        [made(folder, dtype="float64") for folder in (tmp_path / "dense", pruned)]
        for made in (lp.load, lp.load_streamed)
    )
    wanted = explain(a, b, ids, kept=kept)
    reading = read(streamed[0], ids)
    told_cost(reading)
    found = explain(streamed[0], streamed[1], reading, kept=kept, folder=tmp_path)
    assert found.differs
    assert found.adds_up
    again, expected = numbers(found), numbers(wanted)
    assert {"matrices error", "tokens kl", "kl_only", "kl"} <= expected.keys() == again.keys()
    for what, value in expected.items():
        if not what.endswith("off"):  # rounding itself
            np.testing.assert_allclose(again[what], value, rtol=1e-6, atol=1e-10, err_msg=what)
    for decoder in streamed:
        stream: Any = decoder.stream
        assert stream.passes <= READINGS
        assert all(p.is_meta for p in decoder.layers.parameters())
    with pytest.raises(LyapunovPruneError, match="one model is streamed"):
        explain(a, streamed[1], ids, kept=kept)


def test_all_layers_cost_no_more_than_is_said(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = make_tiny("llama", num_hidden_layers=20)
    other = perturbed(dense)
    counted = [0]

    def count(module: nn.Module, args: Any, output: Any) -> None:
        if output.shape[1] == ids.shape[1]:  # not what is tried beforehand on a few tokens
            counted[0] += len(output)

    for model in (dense, other):
        for layer in find_structure(model).layers:
            layer.self_attn.q_proj.register_forward_hook(count)
    explain(dense, other, ids)
    assert counted[0] == forwards(20) * 20 * len(ids) <= (1.3 * 20 + 2) * 20 * len(ids)


def test_nothing_differs(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = explain(llama, copy.deepcopy(llama), ids)
    assert not found.differs
    assert found.kl == 0
    assert not found.error.any()
    assert "Nothing differs" in str(found)


def test_equal_weights_with_another_setting_are_told(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    other = copy.deepcopy(llama)
    other.config.rms_norm_eps = 0.1
    for module_ in other.modules():
        if hasattr(module_, "variance_epsilon"):
            module_.variance_epsilon = 0.1
    found = explain(llama, other, ids)
    assert found.differs
    assert "the weights are the same, and the settings differ (its rms_norm_eps is 0.1" in str(found)


def test_a_profile_gives_its_rho(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    profile = lp.measure_contraction(llama, ids)
    found = explain(llama, perturbed(llama), ids, profile=profile)
    np.testing.assert_array_equal(found.rho, profile.rho)
    assert "rho" in found.to_frame()
    with pytest.raises(LyapunovPruneError, match="profile is of"):
        explain(perturbed(llama), llama, ids, profile=profile)


def broken(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    with torch.no_grad():
        find_structure(other).layers[2].mlp.down_proj.weight[0, 0] = torch.nan
    return other


@pytest.mark.parametrize("which", [0, 1])
def test_the_first_layer_that_is_not_finite_is_named(which: int, llama: PreTrainedModel, ids: torch.Tensor) -> None:
    pair = [llama, llama]
    pair[which] = broken(llama)
    with pytest.raises(NonFiniteError, match="output of layer 2"):
        explain(pair[0], pair[1], ids)


def test_a_compact_model_differs_by_what_was_cut(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = explain(llama, make_compact(llama, Cuts((1,))), ids)
    assert (found.settings, found.blamed) == ("", (1,))


@pytest.mark.parametrize(
    ("other", "options", "told"),
    [
        (lambda: make_tiny("gpt2"), {}, "family of gpt2 and the dense one of llama"),
        (lambda: make_tiny("llama", hidden_size=64), {}, "width of 64"),
        (lambda: make_tiny("llama", vocab_size=101), {}, "vocabulary of 101"),
        (lambda: make_tiny("llama", vocab_size=101, num_hidden_layers=4), {}, "vocabulary of 101"),
        (lambda: operated(make_tiny("llama"), [1]), {}, "5 layers and the dense one 6"),
        (lambda: operated(make_tiny("llama"), [1]), {"kept": (0, 1, 2, 3)}, "do not fit the 5 layers"),
        (lambda: operated(make_tiny("llama"), [1]), {"kept": (0, 2, 3, 4, 6)}, "do not fit the 5 layers"),
        (lambda: operated(make_tiny("llama"), [1]), {"kept": (0, 3, 2, 4, 5)}, "do not fit the 5 layers"),
        (lambda: make_tiny("llama", num_hidden_layers=7), {}, "7 layers and the dense one 6"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(
    other: Callable[[], PreTrainedModel], options: dict[str, Any], told: str, llama: PreTrainedModel, ids: torch.Tensor
) -> None:
    with pytest.raises(LyapunovPruneError, match=told):
        explain(llama, other(), ids, **options)


def test_layers_that_need_more_than_a_state_are_refused(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Prefix.__init__

    def without(self: Prefix, *args: Any) -> None:
        made(self, *args)
        self.entries = tuple(k for k in self.entries if k != 4)

    monkeypatch.setattr(Prefix, "__init__", without)
    with pytest.raises(LyapunovPruneError, match="layer 4 of LlamaForCausalLM uses more"):
        explain(llama, perturbed(llama), ids)


def test_what_the_next_command_can_gain_is_told(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = replace(explain(llama, perturbed(llama), ids), file_size=1000, diagnosis=None)
    alone = np.where(np.arange(8) % 2, 0.01, 0.04)
    uneven = replace(found, kl_only=alone)
    assert any(f"{0.02 / 0.025:.0%} of the KL" in line for line in uneven.answer())
    assert not replace(uneven, by_size=True)._expected()
    pruned = explain(llama, lp.remove_layers(llama, [2, 4]), ids, kept=(0, 1, 3, 5))
    best = max(pruned.gain[[3, 5]]) / pruned.kl
    assert any(f"{best:.0%} goes with removed layer" in line for line in pruned.answer())


def test_the_result_saves_loads_and_draws(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    found = explain(llama, perturbed(llama), ids)
    again = Explanation.load(found.save(tmp_path / "explanation.json"))
    assert str(again) == str(found)
    assert len(found.answer()) <= 8
    assert list(found.to_frame()["layer"]) == ["embedding", *map(str, range(6)), "head"]
    assert "added by the layer" in found.plot()["explanation"]
    assert "<table" in found._repr_html_()
    assert module.explain is lp.explain


def test_the_callback_of_the_guide_prints_while_a_model_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    (block,) = (part.partition("```")[0] for part in page.split("```python\n") if "TrainerCallback" in part)
    exec(block, names)
    model = make_tiny("llama")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (4, 8), generator=generator)
    watch = names["Watch"](copy.deepcopy(model), lp.TokenBatch(ids, "ids", "all", False), every=2)
    settings = TrainingArguments(tmp_path, max_steps=2, use_cpu=True, report_to=[], learning_rate=1e-2)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 90, (8, 8), generator=generator)]
    Trainer(model, settings, train_dataset=rows, callbacks=[watch]).train()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("step "))
    assert line.startswith("step 2: ρ ")
    assert "most by layer" in line
