"""Attention or MLP alone: found, left out, scored and planned."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import KINDS, LAYERS, PARALLEL, TEXT, branches_of, from_settings, hooks_of, make_other, make_tiny
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from experiments.hierarchies import without_branches
from lyapunov_prune import LyapunovPruneError, PruningPlan, load, rank
from lyapunov_prune.forward.anatomy import find_anatomy, silent
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles import sublayer_influence
from lyapunov_prune.pruning.removed import PartsGone
from lyapunov_prune.ranking import LayerRanking, rank_sublayers


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def silenced(decoder: Decoder, attention: tuple[int, ...], mlp: tuple[int, ...]) -> AbstractContextManager[None]:
    found = find_anatomy(decoder, sorted({*attention, *mlp}))
    gone = [*((layer, "attention") for layer in attention), *((layer, "mlp") for layer in mlp)]
    return silent(*(found[layer].parts[kind] for layer, kind in gone))


def silenced_as_zeroed(model: PreTrainedModel, ids: torch.Tensor, **gone: tuple[int, ...]) -> PreTrainedModel:
    """The copy whose output projections are zero: what a branch that is left out by hooks is held against."""
    zeroed = without_branches(model, **gone)
    with silenced(wrap(model), gone.get("attention", ()), gone.get("mlp", ())):
        torch.testing.assert_close(logits(model, ids), logits(zeroed, ids))
    assert hooks_of(model) == hooks_of(zeroed) == 0
    return zeroed


@pytest.mark.parametrize(("attention", "mlp"), [((2,), (0, LAYERS - 1)), ((0, LAYERS - 1), (2,))], ids=str)
def test_a_silenced_branch_is_one_whose_output_projection_is_zero(
    family: str, attention: tuple[int, ...], mlp: tuple[int, ...], ids: torch.Tensor
) -> None:
    model = make_tiny(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    zeroed = silenced_as_zeroed(model, ids, attention=attention, mlp=mlp)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    changed = {name for name, p in zeroed.named_parameters() if not torch.equal(p, before[name])}
    path = find_structure(model).layers_path
    for kind, layers in (("attn|attention", attention), ("mlp|fc2", mlp)):
        own = [name.removeprefix(f"{path}.") for name in changed if re.search(kind, name)]
        changed -= {f"{path}.{name}" for name in own}
        assert {int(name.split(".")[0]) for name in own} == set(layers)
        assert len(own) == len(layers) * (1 + any(name.endswith("bias") for name in own))
    assert not changed
    with silenced(wrap(model), mlp, attention):  # planted: the other branches
        assert not torch.allclose(logits(model, ids), logits(zeroed, ids), rtol=1e-3)


# Families that no list of the package names: mixtures, a shared expert, and a layer of one branch (Nemotron-H).
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


def make_mixture(model_type: str) -> PreTrainedModel:
    model = from_settings(
        model_type,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **MIXTURES[model_type],
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("model_type", list(MIXTURES))
@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_every_expert_is_zeroed(model_type: str, kind: str, ids: torch.Tensor) -> None:
    model = make_mixture(model_type)
    made = silenced_as_zeroed(model, ids, **{kind: (1,)})
    zeroed = {name for name, p in made.named_parameters() if not p.any() and model.get_parameter(name).any()}
    expected = {
        ("mixtral", "mlp"): {"mlp.experts.down_proj"},
        ("qwen2_moe", "mlp"): {"mlp.experts.down_proj", "mlp.shared_expert.down_proj.weight"},
        ("gpt_oss", "mlp"): {"mlp.experts.down_proj", "mlp.experts.down_proj_bias"},
        ("gpt_oss", "attention"): {"self_attn.o_proj.weight", "self_attn.o_proj.bias"},
    }.get((model_type, kind), {"self_attn.o_proj.weight"})
    assert zeroed == {f"model.layers.1.{name}" for name in expected}


@pytest.mark.parametrize("name", ["phi", "cohere", "olmo2", "glm4", "biogpt", "lfm2"])
def test_families_that_no_list_names(name: str, ids: torch.Tensor) -> None:
    model = make_other(name)
    for kind in ("attention", "mlp"):
        zeroed = silenced_as_zeroed(model, ids, **{kind: (1,)})
        assert not torch.equal(logits(zeroed, ids), logits(model, ids))


def test_a_branch_that_ends_in_a_norm_with_a_bias_is_refused() -> None:
    """Zeroing what feeds a LayerNorm leaves its bias in the stream."""
    model: Any = make_tiny("gemma2")
    for layer in model.model.layers:
        layer.post_attention_layernorm = torch.nn.LayerNorm(32)
    torch.nn.init.ones_(model.model.layers[1].post_attention_layernorm.bias)
    without_branches(model, mlp=(1,))
    with pytest.raises(LyapunovPruneError):
        without_branches(model, attention=(1,))


@pytest.mark.parametrize("model_type", ["bloom", "bert"])
def test_families_whose_branches_cannot_be_told_apart_are_refused(model_type: str) -> None:
    """BLOOM adds the residual stream inside its branches, BERT's MLP is two modules with a norm between."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes, is_decoder=True)
    with pytest.raises(LyapunovPruneError):
        without_branches(AutoModelForCausalLM.from_config(config).eval(), mlp=(1,))


def one_branch_model() -> PreTrainedModel:
    """Nemotron-H: a layer is attention, or an MLP, or a state-space mixer, and has nothing else."""
    return from_settings(
        "nemotron_h",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        hybrid_override_pattern="*-M-",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        pad_token_id=0,
    )


def test_layers_of_one_branch_have_one_score(ids: torch.Tensor) -> None:
    model = one_branch_model()
    kinds = [list(find_anatomy(wrap(model), range(4))[i].parts) for i in range(4)]
    assert kinds == [["attention"], ["mlp"], ["attention"], ["mlp"]]
    scores = sublayer_influence(model, ids)
    assert np.isnan(scores.attention).tolist() == np.logical_not(np.isnan(scores.mlp)).tolist() == [False, True] * 2
    assert set(rank_sublayers(scores, "mlp").order) == {1, 3}
    with pytest.raises(LyapunovPruneError, match="2 have attention to leave out"):
        rank_sublayers(scores, "attention").plan(3)
    for criterion in ("kl", "from-end", "random"):
        assert rank(model, ids, criterion=criterion, what="attention").plan(2).gone == PartsGone((), (0, 2))
    with pytest.raises(LyapunovPruneError, match="layer 0"):
        without_branches(model, mlp=(0,))


def test_silencing_leaves_no_hook_after_an_error(llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError), silenced(wrap(llama), (1,), (2,)):
        PruningPlan.given(llama, [])
    assert hooks_of(llama) == 0


# Scores.


@pytest.mark.parametrize("name", [*KINDS, "phi", "cohere", "olmo2", "glm4", "biogpt", "lfm2"])
def test_scores_are_the_definition(name: str, ids: torch.Tensor) -> None:
    """`1 − mean cos(h, h + b(h))` in float64, with the branches run one by one."""
    model = (make_tiny(name) if name in KINDS else make_other(name)).double()
    scores = sublayer_influence(model, ids[:, :12], batch_size=2)
    assert hooks_of(model) == 0
    expected = []
    for branches, output in branches_of(model, ids[:, :12]):
        row = []
        for branch in branches:
            with torch.no_grad():
                before, added = branch.x.view_as(output), branch(branch.x).view_as(output)
            row.append(float(1 - torch.cosine_similarity(before, before + added, dim=-1, eps=0).mean()))
        expected.append(row)
    attention, mlp = np.array(expected).T
    np.testing.assert_allclose(scores.attention, attention, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(scores.mlp, mlp, rtol=1e-6, atol=1e-9)
    parallel = all(s.parallel for s in find_anatomy(wrap(model), [0, 1]).values())
    assert parallel == (name in PARALLEL)


def test_a_factor_of_the_layer_counts() -> None:
    """Granite multiplies its branches before it adds them: with factor 0 nothing turns."""
    config = AutoConfig.for_model(
        "granite", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, residual_multiplier=0.0, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    scores = sublayer_influence(model, torch.arange(24).view(2, 12))
    assert (scores.attention < 1e-12).all()
    assert (scores.mlp < 1e-12).all()


def test_scores_save_and_rank(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    scores = sublayer_influence(llama, ids)
    again = type(scores).load(scores.save(tmp_path / "sublayers.json"))
    assert str(again) == str(scores)
    for what in ("attention", "mlp"):
        ranking = rank_sublayers(scores, what)
        assert ranking.order == tuple(np.argsort(getattr(scores, what)))
        again = LayerRanking.load(ranking.save(tmp_path / "ranking.json"))
        if what == "mlp":
            with pytest.raises(LyapunovPruneError, match="MLP"):
                again.plan(2)
        else:
            assert again.plan(2).gone == PartsGone((), tuple(sorted(ranking.order[:2])))
    with pytest.raises(LyapunovPruneError, match="what is 'norms'"):
        rank_sublayers(scores, "norms")


# The command line.


def test_ranked_planned_pruned_and_loaded(run: Callable[..., Any]) -> None:
    assert run("rank", "tiny", "--what", "attention", "--criterion", "bi", "--remove", "2", *TEXT).code == 0
    plan = PruningPlan.load("runs/tiny/plan.json")
    assert len(plan.gone.attention) == 2
    hand = ",".join(map(str, plan.touched))
    given = {
        "by-plan": ("--plan", "runs/tiny/plan.json", *TEXT),
        "directly": ("--what", "attention", "--criterion", "bi", "--remove", "2", *TEXT),
        "by-hand": ("--what", "attention", "--layers", hand, *TEXT),
    }
    ids, logits = torch.arange(20).unsqueeze(0), []
    for name, options in given.items():
        assert run("prune", "tiny", *options, "-o", name).code == 0
        logits.append(load(name).model(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    with silenced(wrap(dense := AutoModelForCausalLM.from_pretrained("tiny")), plan.gone.attention, ()):
        torch.testing.assert_close(dense(ids).logits, logits[0])
    assert f"of layers of the original: {hand.replace(',', ', ')}." in Path("by-plan/README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--what", "attention", "--criterion", "blend", "--remove", "1"],
            "blend is defined for whole layers",
        ),
        (["--what", "norms", "--remove", "1"], "'norms' is not one of"),
        (["--what", "attention", "--plan", "plan.json"], "plan.json is not there"),
        (
            ["--what", "attention", "--criterion", "bi", "--remove", "7", *TEXT],
            "remove 7 of 6 layers",
        ),
    ],
)
def test_bad_options(options: list[str], message: str, run: Callable[..., Any]) -> None:
    done = run("prune", "tiny", "-o", "out", *options)
    assert (done.code, done.changed, done.err.count("\n")) == (2, set(), 1)
    assert message in done.err


def test_a_profile_cannot_rank_sublayers(run: Callable[..., Any]) -> None:
    done = run("rank", "profile.json", "--what", "attention", "--criterion", "bi")
    assert done.code == 2
    assert "profile.json is not there" in done.err
