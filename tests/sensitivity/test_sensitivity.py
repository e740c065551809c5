"""Sensitivity: regret against direct measurement, what is refused, and what an interruption costs."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import LAYERS, as_batch, assert_same, bits, computed, hooks_of, inputs_of, make_tiny
from scipy import stats
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.methods.magnitude import Magnitude
from lyapunov_prune.compression.methods.rtn import RoundToNearest
from lyapunov_prune.compression.methods.wanda import Wanda
from lyapunov_prune.compression.methods.whitened_svd import WhitenedSVD
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.linalg import basis, truncate
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.profile import profile_layers
from lyapunov_prune.report.sensitivity import sensitivity_figures
from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.compressor import Compressor
from lyapunov_prune.sensitivity.sensitivity import Effect, Sensitivity, measure_sensitivity
from lyapunov_prune.sensitivity.studies import cliff, greedy, greedy_rescored, layer0, rank, threshold
from lyapunov_prune.sensitivity.study import StudyRequest
from lyapunov_prune.sensitivity.table import STUDIES


def whitened(W: torch.Tensor, gram: torch.Tensor, rank: int, **options: float) -> torch.Tensor:
    return WhitenedSVD(**options).compress(W, rank, Statistics(gram.diagonal(), gram))


def wanda(W: torch.Tensor, norms: torch.Tensor, sparsity: float) -> torch.Tensor:
    return Wanda().compress(W, sparsity, Statistics(norms))


@pytest.fixture
def few(ids: torch.Tensor) -> torch.Tensor:
    return ids[:2, :16].reshape(4, 8)


@pytest.fixture(scope="module")
def other() -> torch.Tensor:
    """Tokens for calibration and profile, that `few` does not hold."""
    return torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(7))


def regrets(found: Sensitivity, study: str) -> list[float]:
    return found.of(study).regret.tolist()


def with_weights(name: str, weights: Mapping[Projection, torch.Tensor], ids: torch.Tensor) -> float:
    """Perplexity of a model whose matrices were overwritten."""
    twin = make_tiny(name)
    for p, W in weights.items():
        p.weight(twin).copy_(W)
    return perplexity(twin, ids).value


# The numbers.


def test_gpt2_has_six_groups_a_layer(few: torch.Tensor) -> None:
    """Queries, keys, values, output and the two of the MLP, each with all its heads."""
    model = make_tiny("gpt2")
    frame = measure_sensitivity(model, few, studies=["group"]).of("group")
    assert len(frame) == 6 * LAYERS
    assert frame.groupby("component").layer.apply(list).to_dict() == {
        c: list(range(LAYERS))
        for c in ("attn.c_attn.q", "attn.c_attn.k", "attn.c_attn.v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "phi3"])
def test_regret_is_that_of_the_changed_model(name: str, few: torch.Tensor) -> None:
    model = make_tiny(name)
    before = bits(model)
    found = measure_sensitivity(model, few, studies=["removal", "layer", "sparsity"], sparsity=0.6)
    assert_same(model, before)
    assert hooks_of(model) == 0
    dense, ps = perplexity(model, few).value, find_projections(wrap(model))
    assert found.perplexity == pytest.approx(dense, rel=1e-6)
    for k in (0, 3, 5):
        pruned = with_weights(name, {p: Magnitude().compress(p.weight(model), 0.6) for p in ps if p.layer == k}, few)
        assert regrets(found, "layer")[k] == pytest.approx(pruned - dense, rel=1e-3, abs=1e-4 * dense)
        with skipped(find_structure(model), (k,)):
            removed = perplexity(model, few).value
        assert regrets(found, "removal")[k] == pytest.approx(removed - dense, rel=1e-3, abs=1e-4 * dense)
    pruned = with_weights(name, {p: Magnitude().compress(p.weight(model), 0.9) for p in ps}, few)
    row = found.of("sparsity").iloc[-1]
    assert row.perplexity == pytest.approx(pruned, rel=1e-4)
    assert row.degradation == pytest.approx(pruned / dense, rel=1e-4)
    assert row.low <= row.degradation <= row.high


def test_wanda_and_rank_are_those_of_the_methods(few: torch.Tensor, other: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    ps, dense = find_projections(wrap(model)), perplexity(model, few).value
    norms = input_norms(model, other, ps)
    found = measure_sensitivity(
        model, few, studies=["component"], method="wanda", sparsity=0.4, rank=6, calibration=other
    )
    weights = {}
    for p in ps:
        if p.component == "mlp.c_fc":
            S = wanda(p.weight(model), norms[p.name], 0.4)
            weights[p] = truncate(S, 6, basis(S))
    row = found.of("component").set_index("component").loc["mlp.c_fc"]
    assert row.regret == pytest.approx(with_weights("gpt2", weights, few) - dense, rel=1e-3)
    assert (row.sparsity, row["rank"]) == (0.4, 6)


def test_low_rank_is_whitened_by_the_inputs_of_the_dense_model(few: torch.Tensor, other: torch.Tensor) -> None:
    model = make_tiny("llama")
    ps, inputs = find_projections(wrap(model)), inputs_of(model, other)
    found = measure_sensitivity(model, few, studies=["component"], method="whitened-svd", rank=5, calibration=other)
    keys = [p for p in ps if p.component.endswith("k_proj")]
    weights = {p: whitened(p.weight(model), inputs[p.module].T @ inputs[p.module], 5) for p in keys}
    row = next(r for r in found.of("component").itertuples() if r.component.endswith("k_proj"))
    dense = perplexity(model, few).value
    assert row.regret == pytest.approx(with_weights("llama", weights, few) - dense, rel=1e-3)
    assert (row.sparsity, row.rank) == (0.0, 5)
    kept, whole = sum(5 * sum(W.shape) for W in weights.values()), sum(W.numel() for W in weights.values())
    assert row.saved == pytest.approx((whole - kept) / sum(p.weight(model).numel() for p in ps))
    assert "whitened-svd, rank 5" in found.headline()


def test_rescored_greedy_is_the_best_next_group_by_hand(few: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (greedy, greedy_rescored):
        monkeypatch.setattr(module, "ROUNDS", 2)
    model = make_tiny("llama", num_hidden_layers=2)
    groups = STUDIES.make("group").changes(
        StudyRequest(find_projections(wrap(model)), Compression("magnitude", 0.8, None))
    )

    def by_hand(chosen: tuple[Change, ...]) -> float:
        twin = copy.deepcopy(model)
        for p in (p for change in chosen for p in change.matrices):
            p.weight(twin).copy_(Magnitude().compress(p.weight(model), 0.8))
        return perplexity(twin, few).value

    found = measure_sensitivity(model, few, studies=["greedy-rescored"], sparsity=0.8).of("greedy-rescored")
    first = min(groups, key=lambda g: by_hand((g,)))
    second = min((g for g in groups if g is not first), key=lambda g: by_hand((first, g)))
    assert found.label.tolist() == [f"+ {first.label}", f"+ {second.label}"]
    wanted = [by_hand((first,)), by_hand((first, second))]
    np.testing.assert_allclose(found.perplexity, wanted, rtol=1e-5)


def test_what_is_saved_is_the_share_of_multiplications(few: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    found = measure_sensitivity(model, few, studies=["removal", "group", "sparsity", "rank"], sparsity=0.25)
    frame = found.to_frame().set_index("study")
    np.testing.assert_allclose(frame.saved["removal"], 1 / LAYERS)
    np.testing.assert_allclose(frame.saved["group"].sum(), 0.25)
    np.testing.assert_allclose(frame.saved["sparsity"], [0.1, 0.3, 0.5, 0.7, 0.9])
    # Rank 8: heads are 8 × 32, of no more rank; 32 × 32, 128 × 32 and 32 × 128 become two factors.
    saved, whole = (32 * 32 - 8 * 64) + 2 * (128 * 32 - 8 * 160), 4 * 32 * 32 + 2 * 128 * 32
    assert frame.saved["rank"].iloc[0] == pytest.approx(saved / whole)
    assert frame.saved["rank"].iloc[-1] == 0


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3", "opt"])
def test_every_study_runs(family: str, few: torch.Tensor, other: torch.Tensor, monkeypatch: Any) -> None:
    for module in (greedy, greedy_rescored):
        monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setattr(cliff, "CLIFF_SPARSITIES", (0.5,))
    monkeypatch.setattr(layer0, "FIRST_LAYER_SPARSITIES", (0.3,))
    monkeypatch.setattr(threshold, "THRESHOLD_SPARSITIES", (0.9,))
    monkeypatch.setattr(rank, "UNIFORM_RANKS", (8, 256))
    few, asked = few[:1, :6], [s for s in STUDIES if s != "matrix"]
    found = measure_sensitivity(make_tiny(family), few, studies=asked, calibration=other[:1, :8])
    assert list(found.to_frame().study.unique()) == asked
    assert len(found.of("greedy")) == 2
    rows, group = found.of("cliff"), found.of("group")
    assert set(rows.component) == {group.component[group.perplexity.idxmax()]}
    assert found.of("greedy").regret[0] == group.regret.min()
    assert found.summary().changes.tolist() == [len(found.of(s)) for s in asked]
    assert found.of("rank").regret.tolist()[-1] == pytest.approx(0, abs=1e-4)  # 256 is no restriction


def test_every_study_rounds_too(few: torch.Tensor, other: torch.Tensor, tmp_path: Path) -> None:
    """Against a model with the rounded weights; drawn, saved and loaded again with its bits."""
    model = make_tiny("llama")
    asked = [name for name, known in STUDIES.items() if known.in_all]
    found = measure_sensitivity(model, few, studies=asked, method="rtn", bits=3, calibration=other)
    dense, ps = perplexity(model, few).value, find_projections(wrap(model))
    for k in (0, 4):
        rounded = {p: RoundToNearest().compress(p.weight(model), 3) for p in ps if p.layer == k}
        assert regrets(found, "layer")[k] == pytest.approx(with_weights("llama", rounded, few) - dense, rel=1e-3)
    everything = {p: RoundToNearest().compress(p.weight(model), 2) for p in ps}
    row = found.of("sparsity").iloc[-1]
    assert (row.bits, row.sparsity, row.saved) == (2, 0.0, 0.0)
    assert row.perplexity == pytest.approx(with_weights("llama", everything, few), rel=1e-4)
    assert found.of("threshold").bits.isna().all()
    again = Sensitivity.load(found.save(tmp_path / "sensitivity.json"))
    pd.testing.assert_frame_equal(again.to_frame(), found.to_frame())
    assert {"sensitivity-levels", "sensitivity-cliff", "sensitivity-greedy"} <= set(sensitivity_figures(again))


# rtn to 3 bits is above.
@pytest.mark.parametrize(
    ("method", "bits"),
    [(name, 1.58 if name == "rtn" else 3) for name, known in METHODS.items() if known.unit == "bits"],
)
def test_every_study_takes_every_method_that_rounds(
    method: str, bits: float, few: torch.Tensor, other: torch.Tensor
) -> None:
    model = make_tiny("llama")
    asked = [name for name, known in STUDIES.items() if known.in_all]
    found = measure_sensitivity(model, few[:1], studies=asked, method=method, bits=bits, calibration=other[:1])
    frame = found.to_frame()
    assert set(frame.study) == {*asked}
    assert {"matrix", "layer", "sparsity", "greedy"} <= set(frame[frame.bits.notna()].study)
    assert np.isfinite(frame.perplexity).all()
    assert (found.of("layer").bits == bits).all()
    ps, p = find_projections(wrap(model)), 1
    settings = Compressor(model, other[:1])(Compression(method, 0.0, None, bits), [q for q in ps if q.layer == p])
    wanted = with_weights("llama", settings, few[:1]) - perplexity(model, few[:1]).value
    assert regrets(found, "layer")[p] == pytest.approx(wanted, rel=1e-3, abs=1e-4)


# The threshold.


def effect(study: str, layer: int | None, loss: Any, **rest: Any) -> Effect:
    windows = np.array(loss if isinstance(loss, list) else [loss, loss])
    given: dict[str, Any] = {"label": f"{study} {layer}", "component": None, "method": "wanda", "sparsity": None}
    return Effect(study, layer=layer, windows=windows, **{**given, "rank": None, "saved": 0.1, "drift": 0.2, **rest})


@pytest.fixture(scope="module")
def blank(llama: PreTrainedModel) -> Sensitivity:
    """A result without effects, whose dense perplexity is 1."""
    on = as_batch(llama, torch.zeros(2, 4, dtype=torch.long)).measured_on(llama)
    return Sensitivity(Compression("wanda", 0.5, None), 10.0, np.zeros(2), (), {}, on, None)


@pytest.mark.parametrize("losses", [(math.inf, math.inf), (math.nan, math.nan), (math.inf, math.nan), (math.inf, 0.5)])
def test_a_map_without_a_finite_loss_is_drawn_too(losses: tuple[float, float], blank: Sensitivity) -> None:
    effects = tuple(effect("group", layer, loss, component="mlp") for layer, loss in enumerate(losses))
    drawn = sensitivity_figures(replace(blank, effects=effects))
    assert drawn["sensitivity-map"].startswith("<svg")


def test_the_threshold_is_the_highest_sparsity_below_the_limit(blank: Sensitivity) -> None:
    def star(*regret: float, limit: float = 10.0) -> float | None:
        effects = [
            effect("threshold", 0, math.log1p(r), sparsity=s, label=f"{s}")
            for s, r in zip((0.5, 0.6, 0.7, 0.8), regret, strict=True)
        ]
        return replace(blank, effects=tuple(effects), limit=limit).threshold

    assert star(0, 1, 9, 11) == 0.7
    assert star(0, 1, 9, 11, limit=5) == 0.6
    assert star(0, 0, 0, 0) == 0.8
    assert star(20, 30, 40, 50) is None
    assert star(0, 1, 9, math.inf) == 0.7
    assert star(0, 1, math.nan, math.nan) == 0.6


def test_the_threshold_is_wanda_on_layer_zero(few: torch.Tensor, other: torch.Tensor) -> None:
    model = make_tiny("llama")
    ps, dense = find_projections(wrap(model)), perplexity(model, few).value
    norms = input_norms(model, other, ps)
    found = measure_sensitivity(model, few, studies=["threshold"], calibration=other, limit=1e9)
    assert found.threshold == 0.99
    wanted = {p: wanda(p.weight(model), norms[p.name], 0.8) for p in ps if p.layer == 0}
    assert regrets(found, "threshold")[3] == pytest.approx(with_weights("llama", wanted, few) - dense, rel=1e-3)
    limit = float(np.median(regrets(found, "threshold")))
    below = found.of("threshold").query("regret < @limit").sparsity.max()
    assert replace(found, limit=limit).threshold == below
    assert f"s* = {below:g} (Wanda on layer 0" in str(replace(found, limit=limit))
    assert "s* = below 0.5" in str(replace(found, limit=-1e9))


# Correlations.


def test_correlations_are_spearmans(blank: Sensitivity) -> None:
    dice = np.random.default_rng(0)
    regret = {study: dice.random(6) for study in ("removal", "layer")}
    groups, drift = dice.random((6, 2)), dice.random(6)
    scores = {name: dice.random(6) for name in ("|rho - 1|", "bi", "amplification")}
    effects = [effect("removal", k, math.log1p(regret["removal"][k])) for k in range(6)]
    effects += [effect("layer", k, math.log1p(regret["layer"][k]), drift=drift[k]) for k in (3, 1, 0, 2, 5, 4)]
    effects += [effect("group", k, math.log1p(groups[k, c]), component=f"c{c}") for k in range(6) for c in range(2)]
    effects += [effect("forward", None, 1.0)]
    found = replace(blank, effects=tuple(effects), scores=scores).correlations().set_index(["measured", "against"])
    wanted = {
        ("regret, removal", "|rho - 1|"): (regret["removal"], scores["|rho - 1|"]),
        ("regret, removal", "bi"): (regret["removal"], scores["bi"]),
        ("regret, layer", "amplification"): (regret["layer"], scores["amplification"]),
        ("drift, layer", "|rho - 1|"): (drift, scores["|rho - 1|"]),
        ("regret, group", "amplification"): (groups.mean(1), scores["amplification"]),
    }
    for key, (x, y) in wanted.items():
        spearman = stats.spearmanr(x, y)
        assert found.loc[key, "spearman"] == pytest.approx(spearman.statistic)
        assert found.loc[key, "p"] == pytest.approx(spearman.pvalue)
        assert found.loc[key, "layers"] == 6
        # The definition: Pearson's correlation of ranks.
        assert found.loc[key, "spearman"] == pytest.approx(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1])


def test_a_layer_without_a_number_is_left_out_of_the_correlation(blank: Sensitivity) -> None:
    scores = {"bi": np.array([1.0, 2.0, 9.0, 3.0, 4.0])}
    losses = [0.1, 0.2, math.nan, 0.3, math.inf]
    found = replace(blank, effects=tuple(effect("removal", k, x) for k, x in enumerate(losses)), scores=scores)
    row = found.correlations().iloc[0]
    assert (row.spearman, row.layers) == (pytest.approx(1), 4)


def test_without_a_profile_nothing_is_correlated(few: torch.Tensor) -> None:
    found = measure_sensitivity(make_tiny("llama"), few, studies=["removal"])
    assert found.scores == {}
    assert found.correlations().empty
    assert "Spearman" not in found.headline()


def test_scores_are_those_of_the_profile(few: torch.Tensor, other: torch.Tensor) -> None:
    model = make_tiny("llama")
    profile = profile_layers(model, as_batch(model, other), seeds=range(1))
    found = measure_sensitivity(model, few, profile=profile)
    rho = profile.contraction.rho
    np.testing.assert_allclose(found.scores["|rho - 1|"], np.abs(rho - 1))
    np.testing.assert_allclose(found.scores["bi"], profile.influence.influence)
    downstream = [np.prod(rho[k + 1 :]) for k in range(LAYERS)]
    np.testing.assert_allclose(found.scores["amplification"], downstream, rtol=1e-6)
    assert len(found.correlations()) == 9
    assert found.headline().count("Spearman of") == 9


# The file.


def test_a_result_saves_loads_and_prints(few: torch.Tensor, other: torch.Tensor, tmp_path: Path) -> None:
    found = measure_sensitivity(make_tiny("gpt2"), few, studies=["component", "removal", "forward"], calibration=other)
    again = Sensitivity.load(found.save(tmp_path / "s.json"))
    pd.testing.assert_frame_equal(again.to_frame(), found.to_frame())
    assert str(again) == str(found)
    assert again.measured_on == found.measured_on
    assert again.calibrated_on == found.calibrated_on
    assert [again.effects[i].layer for i in (0, 6, -1)] == [None, 0, 5]
    assert f"Dense perplexity {found.perplexity:.4g}" in str(found)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e4], ids=str)
def test_a_study_that_wrecks_the_model_everywhere_prints_and_saves(
    loss: float, blank: Sensitivity, tmp_path: Path
) -> None:
    effects = (*(effect("removal", k, loss) for k in range(4)), effect("layer", 0, 0.1))
    found = replace(blank, effects=effects, scores={"bi": np.arange(4.0)})
    assert found.summary().study.tolist() == ["removal", "layer"]
    assert "removal" in str(found)
    assert str(Sensitivity.load(found.save(tmp_path / "s.json"))) == str(found)


# Refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"studies": ["group", "hope"]}, "unknown study 'hope'"),
        ({"studies": []}, "unknown study"),
        ({"method": "hope"}, "unknown method 'hope'"),
        ({"sparsity": 1.5}, "sparsity from 0 to 1"),
        ({"rank": 0}, "rank of 1 or more"),
        ({"method": "wanda"}, "wanda .*calibration"),
        ({"method": "balanced"}, "balanced .*calibration"),
        ({"studies": ["threshold"]}, "wanda .*calibration"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_runs(
    options: dict[str, Any], message: str, few: torch.Tensor, tmp_path: Path
) -> None:
    model = make_tiny("llama")
    calls = computed(model)
    with pytest.raises(LyapunovPruneError, match=message):
        measure_sensitivity(model, few, folder=tmp_path, **options)
    assert not calls
    assert not list(tmp_path.iterdir())


def test_text_that_is_in_both_is_refused(llama: PreTrainedModel, few: torch.Tensor) -> None:
    for calibration in (few, few[1:], few.flip(0)):
        with pytest.raises(LyapunovPruneError, match="share 8 tokens"):
            measure_sensitivity(llama, few, method="wanda", calibration=calibration)


def test_a_profile_on_the_same_tokens_is_refused(few: torch.Tensor) -> None:
    model = make_tiny("llama")
    profile = profile_layers(model, as_batch(model, few), seeds=range(1))
    with pytest.raises(LyapunovPruneError, match="tokens of the regret"):
        measure_sensitivity(model, few, profile=profile)
    longer = torch.cat([few, few.flip(1)]).view(2, -1)
    with pytest.raises(LyapunovPruneError, match="tokens of the regret"):
        measure_sensitivity(model, longer, profile=profile)


@pytest.mark.parametrize("changed", [{"num_hidden_layers": 4}, {"seed": 1}], ids=str)
def test_a_profile_of_another_model_is_refused(changed: dict[str, Any], few: torch.Tensor, other: torch.Tensor) -> None:
    model = make_tiny("llama", **changed)
    profile = profile_layers(model, as_batch(model, other), seeds=range(1))
    with pytest.raises(LyapunovPruneError, match="profile is of"):
        measure_sensitivity(make_tiny("llama"), few, profile=profile)


# Interrupted.


@pytest.mark.parametrize("after", [1, 4, 9])
def test_after_an_interruption_only_the_remaining_jobs_run(
    after: int, few: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = make_tiny("llama"), ["layer", "forward", "removal"]
    wanted = measure_sensitivity(model, few, studies=asked)
    made: list[tuple[str, ...]] = []
    compress = Compressor.__call__

    def interrupt(self: Compressor, setting: Compression, matrices: tuple[Projection, ...]) -> Any:
        if len(made) == after:
            raise KeyboardInterrupt
        made.append(tuple(p.name for p in matrices))
        return compress(self, setting, matrices)

    monkeypatch.setattr(Compressor, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(model, few, studies=asked, folder=tmp_path)
    assert hooks_of(model) == 0
    done = [json.loads(line)["key"] for line in next(tmp_path.rglob("*.jsonl")).read_text().splitlines()]
    assert len(done) == after + 1  # and the dense model
    first, after = list(made), -1  # from here on without an interruption
    made.clear()
    found = measure_sensitivity(model, few, studies=asked, folder=tmp_path)
    assert set(Counter(first + made).values()) == {1}
    assert len(first + made) == LAYERS + LAYERS - 1  # layer 0 alone is in both studies
    pd.testing.assert_frame_equal(found.to_frame(), wanted.to_frame())


def test_wanda_s_jobs_are_not_taken_over_for_another_calibration(
    few: torch.Tensor, other: torch.Tensor, tmp_path: Path
) -> None:
    model = make_tiny("llama")
    options: dict[str, Any] = {"studies": ["layer"], "method": "wanda", "folder": tmp_path}
    measure_sensitivity(model, few, calibration=other, **options)
    calls = computed(model)
    measure_sensitivity(model, few, calibration=other, **options)
    assert not calls
    found = measure_sensitivity(model, few, calibration=other.flip(1), **options)
    fresh = measure_sensitivity(model, few, calibration=other.flip(1), **{**options, "folder": None})
    pd.testing.assert_frame_equal(found.to_frame(), fresh.to_frame())
