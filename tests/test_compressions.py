"""Compressions side by side: every row against a float64 reference, the same text for all, nothing seen before."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_tiny, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_softmax
from transformers import PreTrainedModel

from experiments.compressions import (
    ALIKE,
    CompressionTable,
    Setting,
    against,
    beside,
    evaluate_compressions,
    judged,
    told,
)
from experiments.schedules import wide_where_amplified
from lyapunov_prune import LyapunovPruneError, allocate, compress
from lyapunov_prune.allocation import Allocation
from lyapunov_prune.compression.methods.rtn import RoundToNearest
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections


def batch(seed: int, split: str, windows: int = 4) -> TokenBatch:
    ids = torch.randint(97, (windows, 24), generator=torch.Generator().manual_seed(seed))
    return TokenBatch(ids, text="drawn", split=split, bos=None)


SEEN, UNSEEN = batch(0, "calibration"), batch(1, "evaluation")
SETTINGS = (
    Setting("magnitude", sparsity=0.0, label="dense"),
    Setting("wanda", sparsity=0.5, pattern=(2, 4), label="wanda 2:4"),
    Setting("rtn", bits=3, group_size=8),
)


def reference(model: PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    """The loss of every window in nats, from the model's logits, in float64."""
    with torch.no_grad():
        log_p = log_softmax(model(ids).logits[:, :-1].double().numpy(), axis=-1)
    return -np.take_along_axis(log_p, ids[:, 1:, None].numpy(), axis=-1)[..., 0].mean(-1)


@pytest.fixture(scope="module")
def table(llama: PreTrainedModel) -> CompressionTable:
    return evaluate_compressions(llama, SETTINGS, SEEN, UNSEEN)


def test_rows_are_the_compressed_models_on_the_text_that_they_have_not_seen(
    llama: PreTrainedModel, table: CompressionTable
) -> None:
    dense = reference(llama, UNSEEN.ids)
    assert table.dense == pytest.approx(np.exp(dense.mean()), rel=1e-6)
    small = (
        compress(llama, SEEN, method="wanda", sparsity=0.5, pattern=(2, 4)).model,
        compress(llama, method="rtn", bits=3, group_size=8).model,
    )
    for row, model in zip(table.rows[1:], small, strict=True):
        windows = reference(model, UNSEEN.ids)
        assert row.perplexity == pytest.approx(np.exp(windows.mean()), rel=1e-6)
        paired = windows - dense
        assert row.degradation == pytest.approx(np.exp(paired.mean()), rel=1e-6)
        wanted = stats.t.interval(0.95, len(paired) - 1, loc=paired.mean(), scale=stats.sem(paired))
        assert np.log([row.low, row.high]) == pytest.approx(wanted, rel=1e-4)
        assert row.degradation != 1


def test_a_compression_that_takes_nothing_is_the_dense_model(table: CompressionTable) -> None:
    row = table.rows[0]
    assert (row.perplexity, row.degradation, row.low, row.high) == (table.dense, 1.0, 1.0, 1.0)
    assert row.zeros == 0


def test_rows_say_what_was_done_in_the_order_that_was_asked(table: CompressionTable) -> None:
    assert [(r.method, r.allocation, r.unit, r.amount) for r in table.rows] == [
        ("dense", "uniform", "sparsity", 0.0),
        ("wanda 2:4", "uniform", "sparsity", 0.5),
        ("rtn", "uniform", "bits", 3.0),
    ]
    assert table.rows[1].zeros == 0.5
    assert (table.calibration.text_hash, table.measured_on.text_hash) == (SEEN.text_hash, UNSEEN.text_hash)
    assert f"drawn (calibration, {SEEN.text_hash[:12]})" in table.headline()
    assert list(table.to_frame()["degradation"]) == [r.degradation for r in table.rows]


def test_rows_are_compared_window_by_window(table: CompressionTable) -> None:
    one, other = table.rows[1], table.rows[2]
    apart = np.array(one.windows) - np.array(other.windows)
    wanted = stats.t.interval(0.95, len(apart) - 1, loc=apart.mean(), scale=stats.sem(apart))
    assert np.log(against(one, other)) == pytest.approx([apart.mean(), *wanted])
    assert against(one, other)[0] == pytest.approx(one.perplexity / other.perplexity)
    better = replace(one, windows=tuple(loss - 1 for loss in one.windows))
    assert (told(better, one), told(one, better), told(one, one)) == ("better", "worse", ALIKE)
    assert (beside(better, one), beside(one, one)) == ("0.368 (0.368–0.368), better", "1 (1–1)")
    assert [judged(found, "better") for found in ("better", "worse", ALIKE)] == ["Agrees", "Differs", "Not decided"]
    assert [judged(found, ALIKE) for found in ("worse", ALIKE)] == ["Differs", "Agrees"]


def test_a_row_that_is_kept_is_not_measured_again(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Cut off after two rows of three; then another text, of which no row is taken."""
    path = tmp_path / "table.json"

    def run(*chosen: Setting, unseen: TokenBatch = UNSEEN) -> CompressionTable:
        return evaluate_compressions(llama, chosen, SEEN, unseen, path=path)

    two = run(*SETTINGS[:2])
    assert CompressionTable.load(path) == two
    replace(two, rows=(two.rows[0], replace(two.rows[1], zeros=0.25))).save(path)
    all_three = run(*SETTINGS)
    assert [row.zeros for row in all_three.rows[:2]] == [0.0, 0.25]
    assert CompressionTable.load(path) == all_three
    assert all_three.rows[2] == evaluate_compressions(llama, SETTINGS[2:], SEEN, UNSEEN).rows[0]
    replace(all_three, rows=tuple(replace(row, windows=()) for row in all_three.rows)).save(path)
    assert run(SETTINGS[1]).rows[0].zeros == 0.5  # a row of an older version
    other = run(SETTINGS[1], unseen=batch(2, "evaluation"))
    assert CompressionTable.load(path) == other
    assert other.rows[0].windows != two.rows[1].windows


def test_saves_and_loads(table: CompressionTable, tmp_path: Path) -> None:
    assert CompressionTable.load(table.save(tmp_path / "methods.json")) == table


@settings(max_examples=5)
@given(st.lists(st.floats(0, 0.95), min_size=1, max_size=2))
def test_every_sparsity_is_met_and_stands_in_its_interval(llama: PreTrainedModel, sparsities: list[float]) -> None:
    found = evaluate_compressions(llama, [Setting("magnitude", sparsity=s) for s in sparsities], SEEN, UNSEEN)
    for row, sparsity in zip(found.rows, sparsities, strict=True):
        assert row.amount == sparsity
        assert row.zeros == pytest.approx(sparsity, abs=0.5 / (16 * 32))  # rounded to entries; 16 × 32 is the least
        assert row.perplexity == pytest.approx(row.degradation * found.dense)
        assert row.low * (1 - 1e-12) <= row.degradation <= row.high * (1 + 1e-12)


def test_the_model_stays_and_batches_do_not_matter(table: CompressionTable) -> None:
    model = make_tiny("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = evaluate_compressions(model, SETTINGS[2:], SEEN, UNSEEN, batch_size=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found.rows[0].degradation == pytest.approx(table.rows[2].degradation, rel=1e-5)


def test_a_schedule_is_named_or_an_allocation_by_hand(llama: PreTrainedModel) -> None:
    by_hand: Allocation = allocate(llama, "atp", 0.4)
    chosen = [Setting("wanda", "atp", sparsity=0.5), Setting("magnitude", by_hand)]
    rows = evaluate_compressions(llama, chosen, SEEN, UNSEEN).rows
    assert [(r.allocation, r.amount) for r in rows] == [("atp", 0.5), ("atp", 0.4)]


def test_bits_by_rho_are_those_widths_layer_by_layer(llama: PreTrainedModel) -> None:
    """Half of the layers wide, evaluated against rounding by hand; a reversed allocation is another model."""
    chosen = wide_where_amplified(llama, 3.0, profile_of(llama), low=2, high=4)
    turned = replace(chosen, amount=6 - chosen.amount, schedule="reversed")
    rows = evaluate_compressions(llama, [Setting("rtn", a, group_size=8) for a in (chosen, turned)], SEEN, UNSEEN).rows
    assert [(r.allocation, r.unit, r.amount) for r in rows] == [("bits", "bits", 3.0), ("reversed", "bits", 3.0)]
    by_hand = copy.deepcopy(llama)
    wide = [3, 4, 1]  # A = 0.5625, 1.125, 0.75, 3, 3, 1
    with torch.no_grad():
        for p in find_projections(wrap(by_hand)):
            W = p.weight(by_hand)
            W.copy_(RoundToNearest(8).compress(W, 4 if p.layer in wide else 2))
    assert rows[0].perplexity == pytest.approx(np.exp(reference(by_hand, UNSEEN.ids).mean()), rel=1e-6)
    assert rows[1].perplexity != pytest.approx(rows[0].perplexity, rel=1e-4)


def test_one_window_has_no_interval(llama: PreTrainedModel) -> None:
    one = evaluate_compressions(llama, SETTINGS[2:], SEEN, batch(1, "evaluation", windows=1)).rows[0]
    assert np.isnan([one.low, one.high]).all()
    assert one.degradation > 0


def test_text_that_both_share_is_refused(llama: PreTrainedModel) -> None:
    shared = TokenBatch(torch.cat([UNSEEN.ids, SEEN.ids[:1]]), text="leaky", split="evaluation", bos=None)
    with pytest.raises(LyapunovPruneError, match=r"leaky.* 24 tokens"):
        evaluate_compressions(llama, SETTINGS, SEEN, shared)
