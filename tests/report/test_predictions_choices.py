"""The figures of multiple choice with two models."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers import as_batch
from transformers import PreTrainedModel

from lyapunov_prune.models.structure import identify
from lyapunov_prune.predictions import ChoiceComparison
from lyapunov_prune.report.predictions import certificate_figure, choices_figures, options_figure, subspace_figure


@pytest.fixture(scope="module")
def made(llama: PreTrainedModel) -> ChoiceComparison:
    """Six items of two choices, of which the third and the last change; the first two are proven."""
    dense = tuple((-1.0, -2.0) for _ in range(6))
    compressed = tuple((-1.0, -2.0) if i not in (2, 5) else (-2.0, -1.0) for i in range(6))
    lengths = tuple((3.0, 4.0) for _ in range(6))
    return ChoiceComparison(
        dense=dense,
        compressed=compressed,
        characters=lengths,
        gold=(0,) * 6,
        dense_mass=np.array([0.5, 0.1, 0.02, 1e-3, 0.3, 0.2]),
        compressed_mass=np.array([0.4, 0.2, 0.01, 1e-4, 0.3, 0.1]),
        same_top=np.ones(6),
        options_logit=np.full(6, 1e-3),
        options_probability=np.full(6, 1e-2),
        options_kl=np.array([0.1, 0.2, 0.5, 0.0, 0.3, np.nan]),
        kl=np.array([1.0, 1.0, 0.2, 1.0, 2.0, 1.0]),
        radius=np.array([2.0, 2.0, 1.0, 1.0, 0.0, np.nan]),
        radius_of_norms=np.array([1.5, 0.4, 0.5, 0.5, 0.0, np.nan]),
        moved=np.array([1.0, 0.5, 3.0, 8.0, 1.0, np.nan]),
        changed=np.zeros(6),
        compressed_model=identify(llama),
        measured_on=as_batch(llama, torch.arange(8)[None]).measured_on(llama),
    )


def words(svg: str) -> str:
    return " ".join(text.strip() for text in ElementTree.fromstring(svg).itertext())


def test_options_are_a_point_an_item(made: ChoiceComparison) -> None:
    drawn = options_figure(made)
    assert "the same choice, 4" in words(drawn)
    assert "another choice, 2" in words(drawn)
    assert len(re.findall(r"<use [^>]*style=\"fill: #0072b2", drawn)) == 4 + 1  # and one in the legend


def test_the_certificate_counts_the_items_that_the_theorem_decides(made: ChoiceComparison) -> None:
    assert "proven to the left: 40% of 5 items" in words(certificate_figure(made))


def test_what_no_theorem_speaks_of_has_no_certificate(made: ChoiceComparison) -> None:
    nothing = np.full(6, np.nan)
    assert set(choices_figures(made)) == {"options", "subspace", "certificate"}
    assert set(choices_figures(replace(made, radius=nothing, moved=nothing))) == {"options", "subspace"}
    assert set(choices_figures(replace(made, options_kl=nothing))) == {"options", "certificate"}


def test_the_subspace_moved_less_in_the_items_below_the_line(made: ChoiceComparison) -> None:
    assert "less among the options in 4 of 5 items" in words(subspace_figure(made))


def test_the_same_result_draws_the_same_and_another_one_another(made: ChoiceComparison) -> None:
    assert choices_figures(made) == choices_figures(made)
    assert options_figure(made) != options_figure(replace(made, compressed_mass=made.compressed_mass / 2))
    assert certificate_figure(made) != certificate_figure(replace(made, moved=made.moved / 2))
