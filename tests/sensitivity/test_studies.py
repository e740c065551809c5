"""Every study changes what it says it changes, and the same change has one key wherever it is asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import LAYERS, inputs_of, make_tiny
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.compression.method import rank_for
from lyapunov_prune.compression.methods.magnitude import Magnitude
from lyapunov_prune.compression.methods.wanda import Wanda
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.compressor import Compressor
from lyapunov_prune.sensitivity.studies import greedy, greedy_rescored
from lyapunov_prune.sensitivity.study import StudyRequest
from lyapunov_prune.sensitivity.table import STUDIES


def changes(study: str, ps: Sequence[Projection], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    return STUDIES.make(study).changes(StudyRequest(tuple(ps), base, losses))


def wanda(W: torch.Tensor, norms: torch.Tensor, sparsity: float) -> torch.Tensor:
    return Wanda().compress(W, sparsity, Statistics(norms))


BASE = Compression("magnitude", 0.5, None)
# Component types of GPT-2: queries, keys, values, output, and the two of the MLP.
GPT2 = ("attn.c_attn.q", "attn.c_attn.k", "attn.c_attn.v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


@pytest.fixture(scope="module")
def gpt2() -> PreTrainedModel:
    return make_tiny("gpt2")


@pytest.fixture(scope="module")
def ps(gpt2: PreTrainedModel) -> tuple[Projection, ...]:
    return find_projections(wrap(gpt2))


def losses_of(ps: Sequence[Projection], base: Compression = BASE) -> dict[str, float]:
    """A loss for every group: layer 3's is the least of each component, mlp.c_fc has the worst, in layer 4."""
    groups = changes("group", ps, base, {})
    found = {g.key: 1 + 0.01 * abs((g.layer or 0) - 3) + 0.1 * GPT2.index(g.component or "") for g in groups}
    worst = next(g for g in groups if (g.component, g.layer) == ("mlp.c_fc", 4))
    return {**found, worst.key: 9.0}


def test_the_number_of_changes_of_each_study(ps: tuple[Projection, ...]) -> None:
    found = {study: len(changes(study, ps, BASE, losses_of(ps))) for study in STUDIES}
    assert len(ps) == LAYERS * (3 * 4 + 3)  # queries, keys and values of each of four heads
    wanted = {
        "matrix": 90,
        "group": 6 * LAYERS,
        "layer": LAYERS,
        "component": 6,
        "forward": LAYERS,
        "backward": LAYERS,
        "sparsity": 5,
        "rank": 6,
        "layer0": 13,
        "cliff": 5 * LAYERS,
        "greedy": 36,
        "greedy-rescored": 1 + 35,  # the round that losses alone decide, and what is to be measured for the next
        "threshold": 7,
        "removal": LAYERS,
    }
    assert {study: found[study] for study in wanted} == wanted


def test_every_family_has_every_study(family: str) -> None:
    found = find_projections(wrap(make_tiny(family)))
    components = {p.component for p in found}
    groups = changes("group", found, BASE, {})
    losses = {g.key: float(i) for i, g in enumerate(groups)}
    assert len(groups) == len(components) * LAYERS
    for study in STUDIES:
        asked = changes(study, found, BASE, losses)
        assert {c.study for c in asked} == {study}
        assert len({c.label for c in asked}) == len(asked)
        assert len({c.key for c in asked}) == len(asked)


def test_what_each_study_changes(ps: tuple[Projection, ...]) -> None:
    def matrices(study: str) -> list[set[Projection]]:
        return [set(c.matrices) for c in changes(study, ps, BASE, losses_of(ps))]

    def where(*layers: int) -> set[Projection]:
        return {p for p in ps if p.layer in layers}

    assert matrices("matrix") == [{p} for p in ps]
    assert matrices("group") == [
        {p for p in ps if (p.component, p.layer) == (c, k)} for k in range(LAYERS) for c in GPT2
    ]
    assert matrices("layer") == [where(k) for k in range(LAYERS)]
    assert matrices("component") == [{p for p in ps if p.component == c} for c in GPT2]
    assert matrices("forward") == [where(*range(k + 1)) for k in range(LAYERS)]
    assert matrices("backward") == [where(*range(k, LAYERS)) for k in reversed(range(LAYERS))]
    assert matrices("sparsity") == [set(ps)] * 5
    assert matrices("rank") == [set(ps)] * 6
    assert matrices("layer0") == [where(0)] * 13
    assert matrices("threshold") == [where(0)] * 7
    assert matrices("removal") == [set()] * LAYERS
    assert [c.remove for c in changes("removal", ps, BASE, {})] == [(k,) for k in range(LAYERS)]


def test_the_setting_of_each_study(ps: tuple[Projection, ...]) -> None:
    base = Compression("wanda", 0.4, 7)

    def settings(study: str) -> list[tuple[str, float, int | None]]:
        asked = changes(study, ps, base, losses_of(ps, base))
        found = [c.compression for c in asked if c.compression is not None]
        return list(dict.fromkeys((c.method, c.sparsity, c.rank) for c in found))

    for study in ("matrix", "group", "layer", "component", "forward", "backward", "greedy"):
        assert settings(study) == [("wanda", 0.4, 7)]
    assert settings("sparsity") == [("wanda", s, None) for s in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert settings("rank") == [("wanda", 0.0, r) for r in (8, 16, 32, 64, 128, 256)]
    assert settings("layer0")[0] == ("wanda", 0.1, 7)
    assert settings("layer0")[-1] == ("wanda", 0.99, 7)
    assert settings("cliff") == [("wanda", s, 7) for s in (0.3, 0.5, 0.7, 0.9, 0.95)]
    assert settings("threshold") == [("wanda", s, None) for s in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)]
    assert settings("removal") == []


def test_threshold_is_wanda_whatever_the_method(ps: tuple[Projection, ...]) -> None:
    assert {c.compression.method for c in changes("threshold", ps, BASE, {}) if c.compression} == {"wanda"}


def test_greedy_adds_group_after_group_from_the_least(ps: tuple[Projection, ...]) -> None:
    losses = losses_of(ps)
    asked = changes("greedy", ps, BASE, losses)
    labels = {g.label: losses[g.key] for g in changes("group", ps, BASE, {})}
    added = [labels[c.label.removeprefix("+ ")] for c in asked]
    assert added == sorted(labels.values())
    assert asked[0].label == "+ 3 attn.c_attn.q"
    assert asked[-1].label == "+ 4 mlp.c_fc"
    for one, two in pairwise(asked):
        assert set(one.matrices) < set(two.matrices)
    assert set(asked[-1].matrices) == set(ps)


def test_greedy_stops_after_its_rounds(ps: tuple[Projection, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "ROUNDS", 4)
    assert len(changes("greedy", ps, BASE, losses_of(ps))) == 4


def test_rescored_greedy_takes_the_least_loss_of_what_is_left(
    ps: tuple[Projection, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups that cost nothing alone and much together: the order by their own losses takes both at once."""
    monkeypatch.setattr(greedy, "ROUNDS", 5)
    monkeypatch.setattr(greedy_rescored, "ROUNDS", 5)
    few = [p for p in ps if p.layer < 2]
    groups = changes("group", few, BASE, {})
    alone = {g.matrices: 0.1 * i for i, g in enumerate(groups)}

    def loss(change: Change) -> float:
        parts = [m for m in alone if set(m) <= set(change.matrices)]
        together = 10.0 if {groups[0].matrices, groups[1].matrices} <= set(parts) else 0.0
        return sum(alone[m] for m in parts) + together

    losses: dict[str, float] = {}
    asked = changes("greedy-rescored", few, BASE, losses)
    measured = 0
    while any(c.key not in losses for c in asked):
        measured += sum(c.key not in losses for c in asked)
        losses |= {c.key: loss(c) for c in asked}
        asked = changes("greedy-rescored", few, BASE, losses)
    assert measured == 12 + 11 + 10 + 9 + 8
    assert [c.label for c in asked] == [f"+ {groups[k].label}" for k in (0, 2, 3, 4, 5)]
    assert [c.label for c in changes("greedy", few, BASE, losses)] == [f"+ {groups[k].label}" for k in range(5)]
    for one, two in pairwise(asked):
        assert set(one.matrices) < set(two.matrices)


def test_the_cliff_takes_the_component_with_the_worst_group(ps: tuple[Projection, ...]) -> None:
    asked = changes("cliff", ps, BASE, losses_of(ps))
    assert {c.component for c in asked} == {"mlp.c_fc"}
    assert Counter(c.layer for c in asked) == dict.fromkeys(range(LAYERS), 5)
    assert asked[0].label == "0 mlp.c_fc, sparsity 0.3"


def test_a_group_that_gives_nan_is_the_worst(ps: tuple[Projection, ...]) -> None:
    groups = changes("group", ps, BASE, {})
    for bad in groups[::7]:
        losses = {**losses_of(ps), bad.key: math.nan}
        order = [c.label for c in changes("greedy", ps, BASE, losses)]
        known = {g.label: losses[g.key] for g in groups if g is not bad}
        assert order[-1] == f"+ {bad.label}"
        assert [known[label.removeprefix("+ ")] for label in order[:-1]] == sorted(known.values())
        assert {c.component for c in changes("cliff", ps, BASE, losses)} == {bad.component}


def test_an_unknown_study_is_refused(ps: tuple[Projection, ...]) -> None:
    with pytest.raises(LyapunovPruneError, match="unknown study 'hope'"):
        changes("hope", ps, BASE, {})


# Keys.


def everything(ps: tuple[Projection, ...], base: Compression = BASE) -> list[Change]:
    return [c for study in STUDIES for c in changes(study, ps, base, losses_of(ps, base))]


def meaning(change: Change) -> Any:
    return frozenset(p.name for p in change.matrices), change.compression, change.remove


def test_a_key_is_the_same_for_the_same_change_and_for_no_other(ps: tuple[Projection, ...]) -> None:
    asked = [
        change
        for base in (
            BASE,
            Compression("wanda", 0.5, None),
            Compression("magnitude", 0.5, 4),
            Compression("wanda", 0, 8),
            Compression("rtn", 0.5, None),
            Compression("rtn", 0, None, 3),
        )
        for change in everything(ps, base)
    ]
    meanings = {change.key: meaning(change) for change in asked}
    keys = {meaning(change): change.key for change in asked}
    assert len(meanings) == len(keys)
    for change in asked:
        assert meanings[change.key] == meaning(change)
        assert keys[meaning(change)] == change.key
    assert len(keys) < len(asked)


def test_equal_changes_of_several_studies(ps: tuple[Projection, ...]) -> None:
    by = {s: [c.key for c in changes(s, ps, BASE, losses_of(ps))] for s in STUDIES}
    assert by["forward"][0] == by["layer"][0] == by["layer0"][4]
    assert by["backward"][0] == by["layer"][-1]
    assert by["forward"][-1] == by["backward"][-1] == by["sparsity"][2] == by["greedy"][-1]  # all matrices
    assert by["greedy"][0] in by["group"]
    assert set(by["cliff"]) & set(by["group"])


@given(st.floats(0, 1), st.floats(0, 1))
@example(0.12345671, 0.12345672)
def test_two_sparsities_never_share_a_key(a: float, b: float) -> None:
    p = Projection("x", 0, "x", None, None, "x", "weight", 0, 1, False)
    keys = {Change("matrix", "x", (p,), Compression("magnitude", s, None)).key for s in (a, b)}
    assert len(keys) == len({a, b})


def test_a_change_names_its_layer_and_component_when_there_is_one(ps: tuple[Projection, ...]) -> None:
    def kinds(study: str) -> tuple[Any, Any]:
        change = changes(study, ps, BASE, losses_of(ps))[1]
        return change.layer, change.component

    assert kinds("group") == (0, "attn.c_attn.k")
    assert kinds("layer") == (1, None)
    assert kinds("component") == (None, "attn.c_attn.k")
    assert kinds("forward") == (None, None)
    assert kinds("removal") == (1, None)


# Jobs.


def test_a_job_begins_at_the_smallest_layer_that_changes(gpt2: PreTrainedModel, ps: tuple[Projection, ...]) -> None:
    compressor = Compressor(gpt2, None)
    asked = everything(ps)
    for change, job in zip(asked, compressor.jobs(asked), strict=True):
        assert job.key == change.key
        assert job.first == min([p.layer for p in change.matrices] + list(change.remove))
        assert job.remove == change.remove
        assert (job.weights is None) == bool(change.remove)


def test_a_job_makes_the_weights_of_its_setting(
    gpt2: PreTrainedModel, ps: tuple[Projection, ...], ids: torch.Tensor
) -> None:
    compressor, norms = Compressor(gpt2, ids), input_norms(gpt2, ids, ps)

    def made(method: str, sparsity: float, rank: int | None) -> dict[Projection, torch.Tensor]:
        job = compressor.jobs([Change("x", "x", ps[:30], Compression(method, sparsity, rank))])[0]
        assert job.weights is not None
        return dict(job.weights())

    for sparsity in (0.0, 0.3):
        for p, W in made("magnitude", sparsity, None).items():
            assert torch.equal(W, Magnitude().compress(p.weight(gpt2), sparsity))
        for p, W in made("wanda", sparsity, None).items():
            assert torch.equal(W, wanda(p.weight(gpt2), norms[p.name], sparsity))
        for p, W in made("wanda", sparsity, 3).items():
            S = wanda(p.weight(gpt2), norms[p.name], sparsity).double()
            U, sigma, Vt = torch.linalg.svd(S, full_matrices=False)
            torch.testing.assert_close(W.double(), U[:, :3] * sigma[:3] @ Vt[:3], atol=1e-5, rtol=1e-5)
        for p, W in made("magnitude", sparsity, 1000).items():
            assert torch.equal(W, Magnitude().compress(p.weight(gpt2), sparsity))


def test_a_matrix_is_made_once_for_a_setting(
    gpt2: PreTrainedModel, ps: tuple[Projection, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = Compressor._compress
    monkeypatch.setattr(Compressor, "_compress", lambda self, c, p, s: (made.append(p.name), make(self, c, p, s))[1])
    compressor = Compressor(gpt2, None)
    for study in ("forward", "layer", "group"):
        for job in compressor.jobs(changes(study, ps, BASE, {})):
            assert job.weights is not None
            job.weights()
    assert sorted(made) == sorted(p.name for p in ps)
    compressor(Compression("magnitude", 0.7, None), ps[:2])
    assert len(made) == len(ps) + 2
    assert len(compressor._made) == 2  # those of the former setting are gone


@pytest.mark.parametrize("rank", [3, None])
def test_low_rank_goes_by_what_enters_the_dense_model(
    gpt2: PreTrainedModel, ps: tuple[Projection, ...], ids: torch.Tensor, rank: int | None
) -> None:
    """Against the optimum in float64: `‖(W − Ŵ) X‖_F² = Σ_{i>r} σ_i(W X)²` over inputs X of the model as it is."""
    inputs, some = inputs_of(gpt2, ids), [p for p in ps if p.layer in (0, 3)]
    compressor = Compressor(gpt2, ids)
    for method in ("svd", "whitened-svd"):
        setting = Compression(method, 0.3, rank)
        for p, small in compressor(setting, some).items():
            W = p.weight(gpt2).double()
            X = inputs[p.module].T if method == "whitened-svd" else torch.eye(W.shape[1], dtype=torch.float64)
            r = rank_for(W.shape, 0.3) if rank is None else rank
            tail = torch.linalg.svdvals(W @ X)[r:]
            error = torch.linalg.matrix_norm((W - small.double()) @ X)
            torch.testing.assert_close(error, tail.square().sum().sqrt(), rtol=1e-3, atol=1e-6)
            assert int(torch.linalg.matrix_rank(small.double(), rtol=1e-5)) == r


@pytest.mark.parametrize("method", ["balanced", "sparsegpt"])
def test_methods_of_a_gram_matrix_see_no_compressed_layer(
    method: str, gpt2: PreTrainedModel, ps: tuple[Projection, ...], ids: torch.Tensor
) -> None:
    """Alone or among all a matrix is the same; only layer 0 is what `compress` makes, layer by layer."""
    setting = Compression(method, 0.3, None)
    whole = Compressor(gpt2, ids)(setting, [p for p in ps if p.layer in (0, 1, 5)])
    alone = Compressor(gpt2, ids)
    in_order = compress(gpt2, ids, method=method, sparsity=0.3).model
    for p in (ps[-1], ps[0], ps[20]):
        torch.testing.assert_close(alone(setting, [p])[p], whole[p], rtol=1e-4, atol=1e-6)
    assert torch.equal(whole[ps[0]], ps[0].weight(in_order))
    assert not torch.allclose(whole[ps[-1]], ps[-1].weight(in_order), rtol=1e-3)


def test_a_low_rank_takes_the_place_of_its_sparsity(gpt2: PreTrainedModel, ps: tuple[Projection, ...]) -> None:
    base = Compression("svd", 0.5, 4)
    assert (str(base), str(Compression("svd", 0.5, None))) == ("svd, rank 4", "svd, sparsity 0.5")
    assert {c.compression for c in changes("group", ps, base, {})} == {base}
    asked = [c.compression for c in changes("layer0", ps, base, {}) if c.compression]
    assert [(c.sparsity, c.rank) for c in asked[:2]] == [(0.1, None), (0.2, None)]
    assert Compression("svd", 0.9, None).kept((1, 32)) == 32  # no two factors are smaller
    with pytest.raises(LyapunovPruneError, match=r"8 × 32 .*0\.9"):
        Compressor(gpt2, None).jobs(changes("layer0", ps, base, {}))


@pytest.mark.parametrize("method", [name for name, known in METHODS.items() if known.unit == "bits"])
def test_bits_take_the_place_of_sparsities(
    method: str, gpt2: PreTrainedModel, ps: tuple[Projection, ...], ids: torch.Tensor
) -> None:
    base = Compression(method, 0.5, None, 3)
    assert (str(base), base.sparsity) == (f"{method}, 3 bits", 0.0)
    assert Compression(method, 0.5, None).bits == 4

    def bits(study: str) -> list[int | None]:
        asked = changes(study, ps, base, losses_of(ps, base))
        return list(dict.fromkeys(c.compression.bits for c in asked if c.compression is not None))

    for study in ("matrix", "group", "layer", "component", "forward", "backward", "greedy", "greedy-rescored"):
        assert bits(study) == [3]
    for study in ("sparsity", "layer0", "cliff"):
        assert bits(study) == [8, 6, 4, 3, 2]
    assert [c.label for c in changes("layer0", ps, base, {})][:2] == ["8 bits", "6 bits"]
    assert {c.compression.method for c in changes("rank", ps, base, {}) if c.compression} == {"svd"}
    made = Compressor(gpt2, ids)(base, ps[:6])
    in_order = compress(gpt2, ids, method=method, bits=3).model
    for p, W in made.items():  # of layer 0: nothing before it is compressed
        assert torch.equal(W, p.weight(in_order))
        assert not torch.equal(W, p.weight(gpt2))


# Settings.


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        (Compression("magnitude", 0.0, None), 1200.0),
        (Compression("magnitude", 0.75, None), 300.0),
        (Compression("magnitude", 0.0, 5), 350.0),  # two factors, 30 × 5 and 5 × 40
        (Compression("magnitude", 0.75, 5), 300.0),  # sparse is cheaper than factors
        (Compression("magnitude", 0.0, 1000), 1200.0),
        (Compression("magnitude", 1.0, None), 0.0),
        (Compression("svd", 0.5, 5), 350.0),
        (Compression("svd", 0.5, None), 8 * 70.0),  # 8 is the largest r with 70 r ≤ 600
        (Compression("balanced", 0.0, 30), 1200.0),
        (Compression("rtn", 0.5, None, 2), 1200.0),  # as many multiplications, of fewer bits
    ],
    ids=str,
)
def test_multiplications_that_stay(setting: Compression, kept: float) -> None:
    assert setting.kept((30, 40)) == kept


def test_impossible_settings_are_refused() -> None:
    for setting, message in (
        (("hope", 0.5, None), "unknown method 'hope'"),
        (("rtn", 0.5, 4), "rtn .*rank"),
        (("rtn", 0.5, None, 9), "rtn cannot take bits 9"),
        (("wanda", 0.5, None, 4), "wanda takes no bits"),
        (("wanda", 1.5, None), "sparsity from 0 to 1"),
        (("wanda", -0.1, None), "sparsity from 0 to 1"),
        (("wanda", float("nan"), None), "sparsity from 0 to 1"),
        (("wanda", 0.5, 0), "whole rank of 1 or more"),
    ):
        with pytest.raises(LyapunovPruneError, match=message):
            Compression(*setting)
    Compression("magnitude", 1.0, 1)
