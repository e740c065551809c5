"""The figures of a hierarchy probe show what the probe holds."""

from __future__ import annotations

import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
from helpers import words_of
from transformers import PreTrainedModel

from lyapunov_prune import probe_layers
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.predictions import HierarchyProbe
from lyapunov_prune.report.predictions import hierarchy_figure, kl_figure


@pytest.fixture(scope="module")
def probe(llama: PreTrainedModel) -> HierarchyProbe:
    ids = torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(0))
    small = copy.deepcopy(llama)
    for p in find_projections(wrap(small)):
        if p.layer < 4:  # layers 4 and 5 do not change
            p.weight(small).mul_(1.01)
    return probe_layers(llama, ids, change=small, steps=3, what=("attention", "mlp"))


def marks(svg: str) -> int:
    return len(re.findall(r"<use ", svg))


def test_every_space_has_its_panel(probe: HierarchyProbe) -> None:
    words = words_of(hierarchy_figure(probe))
    for word in ("1 − cos, state h", "1 − cos, logits z", "1 − cos, probabilities p", "second-order estimate", "layer"):
        assert word in words
    assert words.count("attention") == words.count("mlp") == 1


def test_divergence_stands_against_its_estimate_and_under_both_bounds(probe: HierarchyProbe) -> None:
    words = words_of(kl_figure(probe))
    assert "KL(p‖q), nats" in words
    assert "estimate Var_p(Δz)/(2T²), T = 1" in words
    assert "range bound" in words
    assert np.isfinite(probe.variance_bound).all()


def test_what_is_not_finite_or_nothing_has_no_point(probe: HierarchyProbe) -> None:
    assert (probe.kl[:, 4:] == 0).all()
    before = {name: draw(probe) for name, draw in (("hierarchy", hierarchy_figure), ("kl", kl_figure))}
    values = {name: getattr(probe, name).copy() for name in ("hidden", "kl")}
    for array in values.values():
        array[1, 2] = np.nan
    fewer = dataclasses.replace(probe, **values)
    assert marks(before["hierarchy"]) - marks(hierarchy_figure(fewer)) == 1
    assert marks(before["kl"]) - marks(kl_figure(fewer)) == 3
    none = dataclasses.replace(
        probe, **{name: 0 * getattr(probe, name) for name in ("kl", "hidden", "hidden_estimate")}
    )
    assert "KL(p‖q), nats" in words_of(kl_figure(none))
    assert "1 − cos, state h" in words_of(hierarchy_figure(none))
