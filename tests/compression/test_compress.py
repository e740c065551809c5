"""One-shot compression: every method and schedule on two families, what the report says, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, inputs_of, make_tiny, moe
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocate import allocate
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.calibration.downstream import token_weights
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.compression.method import rank_for
from lyapunov_prune.compression.recipe import CompressionRequest, _amount, recipe_for
from lyapunov_prune.compression.report import CompressionReport, PackedSize
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.structure import find_structure

FAMILIES = ("llama", "gpt2")


@pytest.mark.parametrize(
    ("name", "method", "schedule"),
    [
        (FAMILIES[(i + j) % 2], method, schedule)  # every method and every schedule meets both
        for (i, (method, known)), (j, schedule) in itertools.product(enumerate(METHODS.items()), enumerate(SCHEDULES))
        if schedule == "uniform" or known.unit != "bits"
    ],
)
def test_every_method_with_every_schedule(name: str, method: str, schedule: str, ids: torch.Tensor) -> None:
    """The contract: original untouched, same shapes and dtype, the budget met by what was kept, finite logits."""
    model = make_tiny(name)
    before = copy.deepcopy(model.state_dict())
    kind = METHODS[method].unit
    # Rank 1 of a head of GPT-2 (8 × 32) is 16 % of its parameters: no low rank is smaller.
    amount: dict[str, Any] = {"bits": 6} if kind == "bits" else {"sparsity": 0.4}
    done = compress(model, ids, method=method, allocation=schedule, **amount)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    projections = {p.name: p for p in find_projections(wrap(done.model))}
    assert set(projections) == {m.name for m in done.report.matrices}
    sizes = [m.rows * m.columns for m in done.report.matrices]
    mean, budget = np.average([m.amount for m in done.report.matrices], weights=sizes), next(iter(amount.values()))
    assert mean == pytest.approx(budget, rel=1e-9)
    for m in done.report.matrices:
        W = projections[m.name].weight(done.model)
        assert W.shape == (m.rows, m.columns)
        if kind == "sparsity":
            # Wanda's share is that of every row, so it may be off by half an entry a row.
            assert m.zeros == pytest.approx(m.amount, abs=0.5 / m.columns + 1e-9)
        elif kind == "rank" and m.amount > 0:
            assert m.rank == rank_for((m.rows, m.columns), m.amount)
            assert int(torch.linalg.matrix_rank(W.double(), rtol=1e-5)) <= m.rank
        elif kind == "bits":
            assert m.bits == m.amount
            # awq divides by a scale of each input, which leaves a row no fewer values.
            assert method == "awq" or all(len(row.unique()) <= 2**m.bits for row in W)
    untouched = set(before) - {f"{p.module}.{p.parameter}" for p in projections.values()}
    after = done.model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in untouched)
    assert done.model(ids).logits.isfinite().all()


def test_the_report_says_what_the_outputs_lost(ids: torch.Tensor) -> None:
    """Errors against a float64 reference: the first layer sees the same inputs as in the dense model."""
    model = make_tiny("llama")
    done = compress(model, ids, method="sparsegpt", sparsity=0.5)
    inputs = inputs_of(model, ids)
    first = [p for p in find_projections(wrap(model)) if p.layer == 0]
    rows = {m.name: m for m in done.report.matrices}
    for p in first:
        W, after, x = p.weight(model).double(), p.weight(done.model).double(), inputs[p.module]
        assert rows[p.name].weight_error == pytest.approx(float((W - after).norm() / W.norm()), rel=1e-6)
        if p.component in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            wanted = float((x @ (W - after).T).norm() / (x @ W.T).norm())
            assert rows[p.name].output_error == pytest.approx(wanted, rel=1e-5)
    frame = done.report.summary()
    assert list(frame["layer"]) == list(range(6))
    assert frame["zeros"].tolist() == pytest.approx([0.5] * 6)


def test_streaming_sees_the_compressed_layers_before(ids: torch.Tensor) -> None:
    """With statistics of the dense model the masks of later layers would be others."""
    model = make_tiny("llama")
    done = compress(model, ids, method="wanda", sparsity=0.7)
    dense = inputs_of(model, ids)
    p = next(p for p in find_projections(wrap(model)) if p.layer == 5 and p.component == "mlp.down_proj")
    score = p.weight(model).double().abs() * dense[p.module].norm(dim=0)
    mask = torch.zeros_like(score).scatter_(1, score.argsort(1)[:, : round(0.7 * score.shape[1])], 1).bool()
    assert not torch.equal(p.weight(done.model) == 0, mask)


def test_a_pattern_and_an_allocation_by_hand(ids: torch.Tensor, tmp_path: Path) -> None:
    model = make_tiny("llama")
    done = compress(model, ids, method="wanda", sparsity=0.5, pattern=(2, 4))
    for p in find_projections(wrap(done.model)):
        assert ((p.weight(done.model).unflatten(1, (-1, 4)) == 0).sum(-1) == 2).all()
    chosen = allocate(model, "atp", 0.5)
    amounts = chosen.amount.copy()
    amounts[0] = 0.0
    by_hand = type(chosen)(**{**vars(chosen), "amount": amounts, "schedule": "by hand"})
    done = compress(model, ids, method="magnitude", allocation=by_hand)
    assert torch.equal(
        find_projections(wrap(model))[0].weight(done.model), find_projections(wrap(model))[0].weight(model)
    )  # nothing taken from it
    loaded = CompressionReport.load(done.report.save(tmp_path / "compression.json"))
    assert str(loaded) == str(done.report)
    assert "neither memory nor time" in loaded.headline()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "wnada", "sparsity": 0.5}, "unknown method 'wnada'"),
        ({"method": "wanda"}, "needs an amount"),
        ({"method": "wanda", "sparsity": 0.5, "rank": 3}, "sparsity and rank"),
        ({"method": "wanda", "bits": 4}, "takes sparsity"),
        ({"method": "rtn", "sparsity": 0.5}, "takes bits"),
        ({"method": "rtn", "bits": 32}, "rtn.*bits 32"),
        ({"method": "svd", "rank": 32}, "rank 32"),
        ({"method": "svd", "rank": 0}, "svd.*rank 0"),
        ({"method": "rtn", "bits": 4, "allocation": "atp"}, "atp .* bits"),
        ({"method": "svd", "rank": 4, "allocation": "atp"}, "atp .* rank"),
        ({"method": "wanda", "sparsity": 0.5, "allocation": "best"}, "unknown schedule 'best'"),
        (
            {"method": "wanda", "sparsity": 0.5, "allocation": "atp", "schedule_options": {"beta": "steep"}},
            "beta.*'steep'",
        ),
        ({"method": "wanda", "sparsity": 0.5, "schedule_options": {"beta": 0.1}}, "uniform has no beta.*atp"),
        ({"method": "wanda", "sparsity": 1.5}, "1.5"),
        ({"method": "wanda", "sparsity": 0.4, "pattern": (2, 4)}, "0.5"),
        ({"method": "wanda", "sparsity": 0.5, "pattern": (2, 4), "allocation": "atp"}, "allocation uniform"),
        ({"method": "svd", "sparsity": 0.99}, "no rank"),
        ({"method": "svd", "sparsity": 0.5, "group_size": 8}, "no group_size"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str, llama: PreTrainedModel) -> None:
    ids = torch.arange(64).reshape(2, 32)
    with pytest.raises(LyapunovPruneError, match=message):
        compress(llama, ids, **options)


def test_a_matrix_that_is_not_finite_is_named() -> None:
    model = make_tiny("llama")
    model.model.layers[2].mlp.up_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(LyapunovPruneError, match=r"model\.layers\.2\.mlp\.up_proj.*NaN"):
        compress(model, None, method="magnitude", sparsity=0.5)


def test_text_is_asked_for_where_it_is_needed(llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match="calibration text"):
        compress(llama, method="sparsegpt", sparsity=0.5)
    assert compress(llama, method="magnitude", sparsity=0.5).report.calibration is None


def test_an_allocation_of_another_model_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match="allocate"):
        compress(llama, method="magnitude", allocation=allocate(make_tiny("gpt2"), "uniform", 0.5))


def test_the_parameters_of_a_schedule_reach_it(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    options = {"method": "magnitude", "sparsity": 0.5, "allocation": "atp"}
    found = compress(llama, schedule_options={"beta": 0.02}, **options).report.allocation
    np.testing.assert_array_equal(found.amount, allocate(llama, "atp", 0.5, beta=0.02).amount)
    with pytest.raises(LyapunovPruneError, match="leave out beta"):
        compress(llama, method="magnitude", allocation=found, schedule_options={"beta": 0.02})


def test_a_matrix_of_one_row_stays_and_is_told_so() -> None:
    """The gate of Qwen2-MoE's shared expert; no two factors are smaller."""
    model = moe("qwen2_moe")
    done = compress(model, method="svd", sparsity=0.5)
    rows = [m for m in done.report.matrices if m.rows == 1]
    assert {m.component for m in rows} == {"mlp.shared_expert_gate"}
    assert {(m.rank, m.weight_error) for m in rows} == {(None, 0.0)}
    assert all(m.rank for m in done.report.matrices if m.rows > 1)
    for p in find_projections(wrap(model)):
        assert torch.equal(p.weight(model), p.weight(done.model)) is (p.weight(model).shape[0] == 1)


def test_matrices_shared_between_layers_are_refused() -> None:
    model = make_tiny("llama")
    layers = model.model.layers
    layers[3].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    with pytest.raises(LyapunovPruneError, match="are the same matrix"):
        compress(model, method="magnitude", sparsity=0.5)


@pytest.mark.parametrize(
    ("method", "options", "kept"),
    [
        ("magnitude", {"sparsity": 0.5}, (None, None)),
        ("svd", {"rank": 3}, (3, None)),
        ("svd", {"rank": 20}, (20, None)),  # more than a matrix of keys has: all of it
        ("rtn", {"bits": 5}, (None, 5)),
    ],
)
def test_a_row_says_what_its_method_kept(method: str, options: Any, kept: Any, llama: PreTrainedModel) -> None:
    report = compress(llama, method=method, **options).report
    wanted = {(min(kept[0], m.rows, m.columns) if kept[0] else None, kept[1]) for m in report.matrices}
    assert {(m.rank, m.bits) for m in report.matrices} == wanted
    assert all(m.output_error is None for m in report.matrices)
    assert report.calibration is None


def test_a_layer_has_the_means_of_its_entries(ids: torch.Tensor) -> None:
    """Shares weighted by entries, errors as root mean squares of the matrices."""
    report = compress(make_tiny("gpt2"), ids, method="sparsegpt", sparsity=0.5).report
    matrices = [
        dataclasses.replace(m, amount=0.1 * (k % 7), zeros=0.05 * (k % 11)) for k, m in enumerate(report.matrices)
    ]
    report = dataclasses.replace(report, matrices=tuple(matrices))
    frame = report.summary()
    assert frame["layer"].tolist() == list(range(6))
    for layer in range(6):
        own = [m for m in matrices if m.layer == layer]
        size = sum(m.rows * m.columns for m in own)
        row = frame.iloc[layer]
        assert row["sparsity"] == pytest.approx(sum(m.amount * m.rows * m.columns for m in own) / size)
        assert row["zeros"] == pytest.approx(sum(m.zeros * m.rows * m.columns for m in own) / size)
        for error in ("weight_error", "output_error"):
            squares = [getattr(m, error) ** 2 for m in own]
            assert row[error] == pytest.approx((sum(squares) / len(squares)) ** 0.5)
    assert report.brief()["output_error"].tolist() == sorted(frame["output_error"], reverse=True)
    whole = sum(m.rows * m.columns for m in matrices)
    assert report.zeros == pytest.approx(sum(m.zeros * m.rows * m.columns for m in matrices) / whole)


def test_a_method_is_called_with_what_its_unit_asks_for() -> None:
    """10 × 15: rank r has 25 r parameters of 150. Nothing to take is nothing, and of bits there are always some."""
    assert _amount(METHODS["magnitude"](), 0.0, "sparsity", (10, 15)) is None
    assert _amount(METHODS["magnitude"](), 1e-9, "sparsity", (10, 15)) == 1e-9
    assert _amount(METHODS["rtn"](), 4.0, "bits", (10, 15)) == 4
    assert _amount(METHODS["svd"](), 0.0, "sparsity", (10, 15)) is None
    assert _amount(METHODS["svd"](), 0.5, "sparsity", (10, 15)) == 3
    assert _amount(METHODS["svd"](), 7.0, "rank", (10, 15)) == 7
    assert _amount(METHODS["svd"](), 12.0, "rank", (10, 15)) == _amount(METHODS["svd"](), 12.0, "rank", (15, 10)) == 10


def test_the_pattern_says_the_sparsity(llama: PreTrainedModel) -> None:
    report = compress(llama, method="magnitude", pattern="1:4").report
    assert report.allocation.budget == 0.75
    assert {m.amount for m in report.matrices} == {0.75}
    assert report.pattern == (1, 4)
    assert "magnitude 1:4, " in report.headline()


def test_what_is_packed_is_told_beside_what_it_would_be() -> None:
    line = PackedSize("pack-quantized", 2_500_000, 10_000_000, 5_000_000).line()
    assert "2.5 MB, 4 bits a weight, 0.250 of the 10.0 MB" in line


def test_a_report_of_before_is_of_grids_with_a_zero_point(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Files that say nothing of symmetry or of packing are older than both."""
    report = compress(llama, method="rtn", bits=4).report
    path = report.save(tmp_path / "report.json")
    content = json.loads(path.read_text())
    del content["symmetric"], content["packed"]
    path.write_text(json.dumps(content))
    old = CompressionReport.load(path)
    assert old.symmetric is False
    assert old.packed is None
    assert old.headline() == report.headline()
    assert "symmetric" not in old.headline()


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_each_layer_is_handed_back_when_its_matrices_are_compressed(method: str, ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    given: list[tuple[int, int]] = []

    def put(layer: int) -> None:
        weights = [each.mlp.up_proj.weight for each in find_structure(model).layers]
        given.append((layer, sum(bool((W == 0).any()) for W in weights)))

    recipe_for(model, ids, CompressionRequest(method, 0.5)).apply(model, put)
    assert given == [(layer, layer + 1) for layer in range(len(given))]
    assert len(given) == find_structure(model).num_layers


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("how", [{"method": "gptq", "bits": 3}, {"method": "sparsegpt", "sparsity": 0.5}], ids=str)
def test_tokens_are_weighted_and_outputs_corrected_layer_by_layer(
    name: str, how: dict[str, Any], ids: torch.Tensor
) -> None:
    """Each matrix is what its method makes of sums over the inputs in the dense and in the partly compressed model."""
    model = make_tiny(name).double()
    projections = find_projections(wrap(model))
    done = compress(model, ids, weighted=True, correction=0.5, **how)
    before, partly = inputs_of(model, ids), copy.deepcopy(model)
    a = token_weights(read(wrap(model), ids), projections)
    method = METHODS.make(how["method"], correction=0.5)
    amount = next(value for value in how.values() if not isinstance(value, str))
    for layer in range(LAYERS):
        x = inputs_of(partly, ids)
        for p in (p for p in projections if p.layer == layer):
            X, W = x[p.module], p.weight(partly)
            weighted = X * torch.cat(a[p.module]).unsqueeze(1)
            statistics = Statistics(X.norm(dim=0), weighted.T @ X, drift=(before[p.module] - X).T @ weighted)
            torch.testing.assert_close(p.weight(done.model), method(W, amount, statistics), rtol=1e-6, atol=1e-9)
        with torch.no_grad():
            for p in (p for p in projections if p.layer == layer):
                p.weight(partly).copy_(p.weight(done.model))
    assert (done.report.weighted, done.report.correction) == (True, 0.5)
    assert ", tokens weighted, corrected by 0.5" in done.report.headline()
    plain = compress(model, ids, **how)
    assert any(not torch.equal(p.weight(plain.model), p.weight(done.model)) for p in projections if p.layer == 0)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("gptq", "sparsegpt")])
def test_other_methods_neither_weigh_nor_correct(method: str, llama: PreTrainedModel, ids: torch.Tensor) -> None:
    amount: dict[str, Any] = {"bits": 4} if METHODS[method].unit == "bits" else {"sparsity": 0.5}
    for option in ({"weighted": True}, {"correction": 0.5}):
        with pytest.raises(LyapunovPruneError, match=rf"{method} has no {next(iter(option))}.*sparsegpt, gptq"):
            compress(llama, ids, method=method, **option, **amount)
