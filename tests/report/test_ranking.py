"""Figures of rankings."""

from __future__ import annotations

import numpy as np
import torch
from helpers import as_batch
from transformers import PreTrainedModel

from lyapunov_prune.ranking.tried import BestRemoval, Final, Tried
from lyapunov_prune.report.ranking import best_figure


def test_sets_that_were_mended_are_drawn_beside_the_others(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    on = as_batch(llama, ids).measured_on(llama)
    losses = np.array([2.0, 3.0])
    tried = (Tried("bi", (1,), losses, False, 1.5), Tried("2 for 1", (2,), losses + 1, True, 2.0))
    search = BestRemoval(tried, 0, np.array([1.0, 1.0]), 20.0, (), (0,), on, on)
    assert "mended" not in best_figure(search)
    search = search.with_finals([Final((1,), losses / 2, losses, losses / 2, 2.5)], on)
    drawn = best_figure(search)
    assert all(label in drawn for label in ("proposed by a criterion", "swap of one layer", "mended", "chosen"))
