"""Every family's experts by every criterion: scored, ordered, planned, removed, and through the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import MIXTURES, make_mixture

import lyapunov_prune as lp
from lyapunov_prune.forward.masking import masked_experts
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.profiles.expert_use import expert_use
from lyapunov_prune.ranking.experts import ExpertRanking
from lyapunov_prune.ranking.table import CRITERIA

IDS = torch.randint(97, (1, 24), generator=torch.Generator().manual_seed(0))
BY = tuple(name for name, known in CRITERIA.items() if "experts" in known.parts)


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest) -> Any:
    return make_mixture(request.param)


def test_the_criteria_of_experts() -> None:
    assert set(BY) == {"reap", "frequency", "kl"}


@pytest.mark.parametrize("criterion", BY)
def test_by_every_criterion(criterion: str, mixture: Any, tmp_path: Path) -> None:
    ranking = lp.rank(mixture, IDS, criterion=criterion, what="experts", remove=0.25, folder=tmp_path)
    assert isinstance(ranking, ExpertRanking)
    assert [path.name for path in tmp_path.iterdir()] == ["expert-use.json"]
    use = expert_use(mixture, IDS)
    if criterion == "kl":
        require_kl(mixture, ranking)
    else:
        wanted = use.saliency if criterion == "reap" else use.tokens / use.tokens.sum(-1, keepdims=True)
        np.testing.assert_allclose(ranking.scores, wanted, rtol=1e-4)
    again = ExpertRanking.load(ranking.save(tmp_path / "ranking.json"))
    assert str(again) == str(ranking)
    plan = again.plan(0.25)
    assert {len(plan.gone.experts[layer]) for layer in use.layers} == {2}
    for layer in use.layers:
        groups = again.router.groups_of(plan.gone.experts[layer])
        assert {len(group) for group in groups} == {2 // again.router.groups}
        gone = list(plan.gone.experts[layer])
        assert plan.gone.routed is not None
        assert plan.gone.routed[layer] == pytest.approx(use.weight[layer, gone].sum() / use.weight[layer].sum())
    loaded = lp.PruningPlan.load(plan.save(tmp_path / "plan.json"))
    assert (loaded.gone.experts, str(loaded)) == (plan.gone.experts, str(plan))


@torch.no_grad()
def require_kl(model: Any, ranking: ExpertRanking) -> None:
    """Scores are the KL of predictions between the dense and the masked model."""
    decoder = wrap(model)
    dense = model(IDS).logits[:, :-1].double().log_softmax(-1)
    for layer, expert in ((max(ranking.use.layers), 0), (1, 5)):
        with masked_experts(decoder, {layer: (expert,)}):
            other = model(IDS).logits[:, :-1].double().log_softmax(-1)
        kl = float((dense.exp() * (dense - other)).sum(-1).mean())
        assert ranking.scores[layer, expert] == pytest.approx(kl, rel=1e-3, abs=1e-7)


def test_experts_without_a_token_go_first_and_it_is_said() -> None:
    model: Any = make_mixture("gpt_oss")
    for layer, unused in ((0, 6), (3, 2)):
        model.model.layers[layer].mlp.router.bias.data[unused] = -1e4
    for criterion in BY:
        ranking = lp.rank(model, IDS, criterion=criterion, what="experts")
        assert isinstance(ranking, ExpertRanking)
        unused = ranking.use.unused
        assert (ranking.order(0)[0], unused[0]) == (6, (6,))
        assert ranking.order(3)[0] == unused[3][0] == 2
        assert f"{sum(map(len, unused.values()))} experts got none" in str(ranking)
        assert ranking.plan(1).gone.experts[0] == (6,)


def test_numbers_at_the_edge() -> None:
    model, grouped = make_mixture("mixtral"), make_mixture("deepseek_v3")
    assert len(lp.rank(model, IDS, what="experts", remove=6).plan(6).gone.experts[0]) == 6
    for remove in (7, 0.9):
        with pytest.raises(lp.LyapunovPruneError, match="give 1 to 6"):
            lp.rank(model, IDS, what="experts", remove=remove)
    with pytest.raises(lp.LyapunovPruneError, match="multiple of 2"):
        lp.rank(grouped, IDS, what="experts", remove=3)
    with pytest.raises(lp.LyapunovPruneError, match="4 at most"):
        lp.rank(grouped, IDS, what="experts", remove=6)
    ranking = lp.rank(model, IDS, what="experts")
    assert ranking.criterion == "reap"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"criterion": "bi"}, "bi is defined for layers, attention only.* reap, frequency"),
        ({"criterion": "best", "remove": 2}, "best is defined for whole layers"),
        ({"protect": [0]}, "leave out protect"),
    ],
)
def test_what_is_not_of_experts_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(lp.LyapunovPruneError, match=said):
        lp.rank(make_mixture("mixtral"), IDS, what="experts", **options)
