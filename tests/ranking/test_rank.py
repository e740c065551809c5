"""One call for every criterion: the same as each by itself, kept under its name, refused before it measures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, TEXT, make_tiny
from scipy import stats
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.predictions.divergence import SkipDivergence, SublayerDivergence, sublayer_divergence
from lyapunov_prune.pruning.removed import PartsGone
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.ranking.table import CRITERIA

SEEDS = (0, 1)
OF_LAYERS = [name for name, known in CRITERIA.items() if "layers" in known.parts]
# The file that a criterion keeps, if it has not the criterion's name.
KEPT = dict.fromkeys(("rho", "blend", "blend-minmax"), "profile") | dict.fromkeys(("kl", "cosine"), "divergence")
KEPT |= {"bi": "influence", "from-end": None, "random": None}


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """Windows enough for `best`, which needs eight."""
    return torch.randint(97, (8, 12), generator=torch.Generator().manual_seed(0))


def by_itself(model: PreTrainedModel, ids: torch.Tensor, criterion: str) -> Ranking:
    """The ranking as it is made without `rank`."""
    if criterion == "angular":
        return lp.ranking.angular_distance(model, ids)
    if criterion == "oracle":
        return lp.ranking.greedy_removal(model, ids, 2)
    if criterion == "best":
        return lp.ranking.best_removal(model, ids, 2)
    if criterion in ("kl", "cosine"):
        return lp.ranking.rank_by_divergence(lp.predictions.skip_divergence(model, ids), criterion=criterion)
    if not CRITERIA[criterion].profiled:
        pytest.fail(f"say here what {criterion} is compared with, and in KEPT which file it keeps")
    profile, influence = lp.measure_contraction(model, ids, seeds=SEEDS), lp.block_influence(model, ids)
    return lp.rank_layers(profile, influence, criterion=criterion, alpha=0.3, seed=5)


@pytest.mark.parametrize("criterion", OF_LAYERS)
def test_every_criterion_by_one_call(criterion: str, llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    ranking = lp.rank(
        llama, ids, criterion=criterion, alpha=0.3, remove=2, seeds=SEEDS, seed=5, batch_size=2, folder=tmp_path
    )
    assert (ranking.criterion, ranking.what) == (criterion, "layers")
    wanted, plan = by_itself(llama, ids, criterion).plan(2), ranking.plan(2)
    assert (plan.remove, plan.criterion, plan.alpha) == (wanted.remove, wanted.criterion, wanted.alpha)
    assert [on.text_hash for on in plan.measured_on] == [on.text_hash for on in wanted.measured_on]
    np.testing.assert_allclose(plan.scores, wanted.scores, rtol=1e-4)
    kept = KEPT.get(criterion, criterion)
    assert [path.name for path in tmp_path.glob("*.json")] == [f"{kept}.json"] * (kept is not None)
    again = type(ranking).load(ranking.save(tmp_path / "ranking.json"))
    assert (str(again), again.plan(2).remove) == (str(ranking), plan.remove)


@pytest.mark.parametrize("what", ["attention"])
@pytest.mark.parametrize("criterion", [name for name, c in CRITERIA.items() if "attention" in c.parts])
def test_attention_and_mlp_by_one_call(
    criterion: str, what: str, llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path
) -> None:
    ranking = lp.rank(llama, ids, criterion=criterion, what=what, remove=2, seed=5, folder=tmp_path)
    scores = {
        "bi": lambda: getattr(lp.profiles.sublayer_influence(llama, ids), what),
        "kl": lambda: sublayer_divergence(llama, ids, what).variance,
        "cosine": lambda: sublayer_divergence(llama, ids, what).variance_r,
        "from-end": lambda: np.arange(LAYERS)[::-1],
        "random": lambda: np.random.default_rng(5).permutation(LAYERS),
    }[criterion]()
    plan = ranking.plan(2)
    np.testing.assert_array_equal(plan.scores, scores)
    assert (plan.remove, plan.criterion) == ((), criterion)
    assert plan.gone == PartsGone((), tuple(sorted(np.argsort(scores)[:2].tolist())))
    kept = {"bi": ["sublayers.json"], **{name: ["sublayer-divergence.json"] for name in ("kl", "cosine")}}
    assert [path.name for path in tmp_path.glob("*.json")] == kept.get(criterion, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "good"}, "unknown criterion 'good'"),
        ({"criterion": "best"}, "best .*remove=N"),
        ({"protect": [LAYERS]}, "layer 6 to protect"),
        ({"protect": [0, 1, -1], "remove": 4}, "protected, and 4"),
        ({"criterion": "blend", "alpha": -0.1}, "alpha of blend is -0.1"),
        ({"what": "norms"}, "give 'layers' or 'attention'"),
        ({"criterion": "rho", "what": "attention"}, "rho is defined for whole layers.*what attention"),
        ({"criterion": "bi", "what": "activation"}, "orders activations"),
        ({"criterion": "angular", "what": "attention", "remove": 1}, "angular is defined for whole layers"),
        ({"criterion": "oracle"}, "oracle .*remove=N"),
        ({"criterion": "angular"}, "angular .*remove=N"),
        ({"temperature": 2.0}, "bi .*temperature"),
        ({"mend": True}, "bi .*mend"),
        ({"criterion": "kl", "temperature": 0.0}, "temperature is 0.0"),
        ({"remove": LAYERS}, "remove 6 of 6 layers"),
        ({"criterion": "kl", "what": "attention", "remove": LAYERS + 1}, "remove 7 of 6 layers"),
    ],
)
def test_refused_before_anything_is_measured(
    options: dict[str, Any], message: str, llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "profiles.profile.profile_layers",
        "profiles.influence.block_influence",
        "profiles.influence.sublayer_influence",
        "predictions.divergence.skip_divergence",
        "predictions.divergence.sublayer_divergence",
        "ranking.angular.angular_distance",
        "ranking.oracle.greedy_removal",
        "ranking.best.best_removal",
    ):
        module, _, function = name.rpartition(".")
        monkeypatch.setattr(import_module(f"lyapunov_prune.{module}"), function, pytest.fail)
    with pytest.raises(lp.LyapunovPruneError, match=message):
        lp.rank(llama, ids, **options)


@pytest.mark.parametrize("criterion", OF_LAYERS)
def test_protected_layers_stay(criterion: str, llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    """Whatever the criterion; and where nothing is protected it chooses one of these."""
    free = lp.rank(llama, ids, criterion=criterion, remove=2, seeds=SEEDS).plan(2).remove
    ranking = lp.rank(llama, ids, criterion=criterion, remove=2, seeds=SEEDS, protect=[free[0]])
    plan = ranking.plan(2)
    assert free[0] not in plan.remove
    assert len(plan.remove) == 2
    again = type(ranking).load(ranking.save(tmp_path / "ranking.json"))
    assert again.plan(2).remove == plan.remove
    assert str(again) == str(ranking)


def test_protected_layers_keep_their_branches(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    for criterion in ("bi", "kl", "random", "from-end"):
        ranking = lp.rank(llama, ids, criterion=criterion, what="attention", remove=5, protect=[-2])
        assert ranking.plan(5).gone == PartsGone((), (0, 1, 2, 3, 5))
        with pytest.raises(lp.LyapunovPruneError, match=r"have attention to leave out|beside the protected"):
            ranking.plan(6)


def test_a_blend_is_scaled_over_the_layers_that_may_go(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    profile, influence = lp.measure_contraction(llama, ids, seeds=SEEDS), lp.block_influence(llama, ids)
    influence.influence[0] = 100.0  # would make all others alike
    ranking = lp.rank_layers(profile, influence, criterion="blend", alpha=0.3, protect=[0])
    distance, bi = np.abs(profile.rho - 1)[1:], influence.influence[1:]
    wanted = 0.3 * (distance - np.median(distance)) / stats.iqr(distance) + 0.7 * (bi - np.median(bi)) / stats.iqr(bi)
    np.testing.assert_allclose(ranking.scores[1:], wanted)
    assert np.isnan(ranking.scores[0])


def test_periods_without_a_protected_layer(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    ranking = lp.rank(llama, ids, criterion="from-end", protect=[5])
    assert ranking.plan(2, period=2).remove == (2, 3)
    assert ranking.plan(4, period=2).remove == (0, 1, 2, 3)
    ranking = lp.rank(llama, ids, criterion="from-end", protect=[1, 5])
    with pytest.raises(lp.LyapunovPruneError, match="2 periods"):
        ranking.plan(4, period=2)


def test_a_blend_hides_no_score_that_is_not_finite(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    influence = lp.block_influence(llama, ids)
    influence.influence[3] = np.nan
    with pytest.raises(lp.LyapunovPruneError, match="scores of layers"):
        lp.rank_layers(lp.measure_contraction(llama, ids, seeds=(0,)), influence, criterion="blend")


def test_criteria_are_known_without_torch() -> None:
    script = (
        "import sys\n"
        "from lyapunov_prune.ranking.table import CRITERIA\n"
        "assert not {'torch', 'transformers', 'numpy', 'pandas'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# The command line.


def test_attentions_by_divergence_on_the_command_line(run: Callable[..., Any]) -> None:
    kl = ("--what", "attention", "--criterion", "kl", "--remove", "2", *TEXT)
    done = run("rank", "tiny", *kl)
    assert (done.code, {path.name for path in Path("runs/tiny").iterdir()}) == (
        0,
        {"plan.json", "sublayer-divergence.json"},
    )
    measured = SublayerDivergence.load("runs/tiny/sublayer-divergence.json")
    plan = lp.PruningPlan.load("runs/tiny/plan.json")
    assert plan.gone == PartsGone((), tuple(sorted(np.argsort(measured.variance)[:2].tolist())))
    assert run("prune", "tiny", *kl, "-o", "out").code == 0
    assert '"kl"' in Path("out/provenance.json").read_text()


@pytest.mark.parametrize("criterion", ["rho", "blend", "angular", "oracle"])
def test_criteria_of_whole_layers_are_refused_before_loading(criterion: str, run: Callable[..., Any]) -> None:
    done = run("rank", "absent", "--what", "attention", "--criterion", criterion, "--remove", "1")
    assert (done.code, done.changed, done.err.count("\n")) == (2, set(), 1)
    assert f"{criterion} is defined for whole layers" in done.err


def test_the_help_names_every_criterion(run: Callable[..., Any]) -> None:
    told = run("rank", "--help").out
    assert all(f"{name}:" in told for name in CRITERIA)


@pytest.mark.parametrize("criterion", ["rho", "blend"])
def test_rho_that_is_rounding_is_refused_after_one_window(
    criterion: str, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny("llama").bfloat16()
    assert lp.rank(model, ids, criterion="bi", seeds=SEEDS, folder=tmp_path / "bi").criterion == "bi"
    monkeypatch.setattr("lyapunov_prune.profiles.profile.profile_layers", pytest.fail)
    with pytest.raises(lp.LyapunovPruneError, match=r"bfloat16; .*larger epsilon.*'bi'"):
        lp.rank(model, ids, criterion=criterion, seeds=SEEDS, folder=tmp_path)
    assert not (tmp_path / "profile.json").exists()


def test_the_temperature_of_the_divergence_is_the_one_given(ids: torch.Tensor, tmp_path: Path) -> None:
    kept = {"layers": ("divergence", SkipDivergence), "attention": ("sublayer-divergence", SublayerDivergence)}
    model = make_tiny("llama")
    for what, (name, kind) in kept.items():
        ranking = lp.rank(model, ids, criterion="kl", what=what, temperature=3.0, folder=tmp_path)
        assert kind.load(tmp_path / f"{name}.json").temperature == 3.0
        assert np.nanmin(ranking.scores) == np.nanmin(kind.load(tmp_path / f"{name}.json").variance)
    with pytest.raises(lp.LyapunovPruneError, match="temperature"):
        lp.rank(model, ids, criterion="bi", temperature=3.0)
