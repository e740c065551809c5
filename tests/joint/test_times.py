"""What a removed attention and a merged block save: by hand, and by a clock that the test holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import Cuts
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.joint import times as module
from lyapunov_prune.joint.times import REPEATS, Times, measure_times
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.decoder import wrap_any


def of_seconds(dense: float, attention: float, activation: float, most: tuple[int, int] = (2, 3)) -> Times:
    return Times(4, most, dense, attention, activation, 1, ())


def test_a_pair_is_read_off_the_plane_through_three_models() -> None:
    times = of_seconds(1.0, 0.8, 0.85)
    assert times.saved == pytest.approx((0.1, 0.05))
    table = times.table()
    assert table.shape == (5, 5)
    assert table[0, 0] == 1.0
    assert (table[2, 0], table[0, 3]) == pytest.approx((0.8, 0.85))  # what was measured
    assert table[1, 2] == pytest.approx(0.8)
    assert np.isnan(table[3:]).all()  # so many cannot go
    assert np.isnan(table[:, 4]).all()
    assert np.isfinite(table[:3, :4]).all()
    assert times.to_frame()["speed-up"].tolist() == pytest.approx([1, 1 / 0.8, 1 / 0.85])


def test_noise_saves_nothing_and_not_everything() -> None:
    assert of_seconds(1.0, 1.1, 0.7).saved == pytest.approx((0.0, 0.1))
    assert of_seconds(1.0, 0.8, 1.1).saved == pytest.approx((0.1, 0.0))
    assert of_seconds(1.0, 1.0, 0.7, most=(0, 3)).saved == pytest.approx((0.0, 0.1))
    with pytest.raises(LyapunovPruneError, match="together"):
        of_seconds(1.0, 0.4, 0.4, most=(4, 4)).table()
    few = of_seconds(1.0, 0.8, 0.8, most=(1, 1)).table()  # four of each would save more, but so many cannot go
    np.testing.assert_allclose(few[:2, :2], [[1.0, 0.8], [0.8, 0.6]])


def test_times_are_medians_of_rounds_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 1, 2, … seconds, the last of 100; the second model takes twice, the third half as long."""
    warming = [1000.0] * 3  # of which only the beginnings are asked for
    rounds = [[(7.0, share * took) for share in (1, 2, 0.5)] for took in (*range(1, REPEATS), 100.0)]
    marks = iter(np.cumsum([*warming, *chain(*chain(*rounds))]).tolist())  # 7 seconds go by between two forwards
    monkeypatch.setattr(module, "now", lambda model: next(marks))
    cut: list[Cuts] = []
    monkeypatch.setattr(module, "make_compact", lambda model, cuts: cut.append(cuts) or model)
    model: Any = make_tiny("llama").eval()
    ids = torch.randint(97, (3, 16), generator=torch.Generator().manual_seed(0))
    student = Unmerged(wrap_any(model), "mean-gate", lambda: uncached_logits(model, ids))
    times = measure_times(student, TokenBatch(ids, "ids", "all", bos=False), (2, 3))
    assert (times.dense, times.attention, times.activation) == (5, 10, 2.5)
    assert [sorted(cuts.merged) for cuts in cut if cuts.merged] == [[0, 1, 2]]
    assert [cuts.attention for cuts in cut if cuts.attention] == [(LAYERS - 2, LAYERS - 1)]
    assert (times.layers, times.most) == (LAYERS, (2, 3))
    assert replace(times, most=(4, 3)).saved == pytest.approx((0.0, 2.5 / 3))
