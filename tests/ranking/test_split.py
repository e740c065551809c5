"""Layers and channels, or layers and experts, share one budget: every way is measured as it is, and none is larger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TEXT, Done, make_mixture, make_tiny

from lyapunov_prune import LyapunovPruneError, load, remove_layers, verify_removal
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.ranking.split import split_removal
from lyapunov_prune.ranking.weighed import WeighedPlans

WINDOWS = ["--tokens", "256", "--context", "64"]
IDS = torch.randint(97, (8, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("family", "what", "remove"),
    [
        ("llama", "layers,width", 0.3),
        ("gpt2", "layers,width", 0.3),
        ("gpt_oss", "layers,experts", 0.3),
        ("deepseek_v3", "layers,experts", 0.15),
    ],
)
@torch.no_grad()
def test_every_way_is_measured_as_it_is_and_the_cheapest_chosen(
    family: str, what: str, remove: float, tmp_path: Path
) -> None:
    model: Any = make_mixture(family) if "experts" in what else make_tiny(family)
    found = split_removal(model, IDS, remove, what, criterion="bi")
    layers, total = sum(p.numel() for p in wrap(model).layers.parameters()), model.num_parameters()
    dense = model(IDS[1::2]).logits[:, :-1].double().log_softmax(-1)
    kinds = set()
    for plan, left, kl in zip(found.plans, found.left, found.kl, strict=True):
        pruned = remove_layers(model, plan)
        assert pruned.num_parameters() == left <= total - remove * layers
        kinds.add((bool(plan.remove), plan.drops_parts))
        other = pruned(IDS[1::2]).logits[:, :-1].double().log_softmax(-1)
        assert kl == pytest.approx((dense.exp() * (dense - other)).sum(-1).mean(-1).numpy(), rel=1e-3, abs=1e-7)
    assert kinds >= {(True, False), (False, True)}
    assert found.kl[found.chosen].mean() == found.kl.mean(1).min()
    plan = found.plan()
    assert plan.measured_on[-1] == found.measured_on
    assert verify_removal(model, remove_layers(model, plan), plan, IDS).passed
    again = WeighedPlans.load(found.save(tmp_path / "weighed.json"))
    assert str(again) == str(found)


def test_best_is_searched_anew_for_every_number_of_layers() -> None:
    found = split_removal(make_tiny("llama"), IDS, 0.5, "layers,width", protect=[0])
    assert [len(plan.remove) for plan in found.plans] == [1, 2, 3]  # a half is more than all channels hold
    assert {plan.criterion for plan in found.plans} == {"best, then token", "best"}
    assert not any(0 in plan.remove for plan in found.plans)


def test_an_expert_that_gets_no_token_is_among_those_that_go() -> None:
    model: Any = make_mixture("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.router.bias.data[6] = -1e4
    found = split_removal(model, IDS, 0.2, "layers,experts", criterion="bi")
    for plan in found.plans:
        assert all(6 in gone for gone in plan.experts_gone.values())
        assert verify_removal(model, remove_layers(model, plan), plan, IDS).passed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": IDS[:3]}, "3.*give 4"),
        ({"what": "layers,attention"}, "layers,attention"),
        ({"what": "layers,experts"}, "LlamaModel has experts"),
        ({"remove": 0.99}, "99% of the parameters"),
        ({"remove": 20}, "20"),
        ({"protect": list(range(6)), "remove": 0.7}, "protect fewer"),
    ],
)
def test_what_cannot_be_shared_is_refused(changes: dict[str, Any], said: str) -> None:
    asked = {"batch": IDS, "remove": 0.3, "what": "layers,width", "criterion": "bi"} | changes
    with pytest.raises(LyapunovPruneError, match=said):
        split_removal(make_tiny("llama"), asked.pop("batch"), asked.pop("remove"), asked.pop("what"), **asked)


def test_from_the_command_line_to_one_checkpoint(run: Callable[..., Done], run_bad: Callable[..., str]) -> None:
    asked = ("prune", "tiny", "--what", "layers,width")
    done = run(*asked, "--remove", "40%", "--criterion", "bi", *WINDOWS, "-o", "out")
    assert done.code == 0, done.err
    assert "alone: KL" in done.out
    made = Provenance.load(Path("out") / PROVENANCE)
    assert made.gate.passed
    pruned = load("out")
    assert pruned.structure.num_layers == len(made.plan.kept)
    made.plan.save(Path("plan.json"))
    done = run("prune", "tiny", "--plan", "plan.json", *WINDOWS, "-o", "again")
    assert done.code == 0, done.err
    assert load("again").identity.weights == pruned.identity.weights
    for given, told in (
        (("--remove", "2"), "--remove 25%"),
        (("--max-kl", "1"), "--remove 25%"),
        (("--layers", "1"), "--layers"),
        (("--remove", "20%", "--mend"), "--mend"),
        (("--remove", "20%", "--format", "compact"), "--format"),
        (("--remove", "20%", "--device", "disk"), "--what needs the model in memory"),
        (("--remove", "20%", "--criterion", "reap"), "reap is defined for experts"),
    ):
        assert told in run_bad(*asked, *given, *TEXT, "-o", "other")
    assert "share a budget in prune" in run_bad("rank", "tiny", "--what", "layers,width", *TEXT)
