"""The figure of a joint removal: the same for the same result."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np

from lyapunov_prune.joint import decide, fit_map
from lyapunov_prune.joint.importance import Importance
from lyapunov_prune.report.joint import importance_figure, joint_figure

PAIRS = np.array([(a, g) for a in range(0, 9, 2) for g in range(0, 9, 2)])
MAP = fit_map(PAIRS / 12, 80 - PAIRS.sum(1) - (PAIRS[:, 0] - PAIRS[:, 1] + 2) ** 2 / 4)


def test_every_measured_point_and_every_pair_of_the_budget_is_drawn() -> None:
    decision = decide(MAP, 12, remove=8, selection_error=0.0)
    text = joint_figure(MAP, decision)
    assert text == joint_figure(MAP, decision)
    groups = [group for group in ET.fromstring(text).iter() if group.get("id", "").startswith("PathCollection")]
    counts = [sum(1 for element in group.iter() if element.tag.endswith("use")) for group in groups]
    assert [c for c in counts if c][:3] == [len(PAIRS), 9, 1]
    for word in ("measured", "budget", "chosen", "attentions removed", "score after recovery"):
        assert word in text


def test_importance_has_an_axis_for_each_type() -> None:
    taylor = Importance("taylor", "mean-gate", 4, np.array([1.0, 2.0, 3.0]), np.array([1e-3, 2e-3, 0.0]))
    text = importance_figure(taylor)
    assert text == importance_figure(taylor)
    for word in ("attention", "activation", "layer"):
        assert word in text
