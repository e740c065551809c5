"""A profile's two parts are of one model and one text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.profiles import profile
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.influence import block_influence
from lyapunov_prune.profiles.profile import HOW, LayerProfile, kept_profile, profile_layers


def test_a_profile_knows_what_it_was_measured_on(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    batch = TokenBatch(ids, "a book", "calibration", False)
    assert profile_layers(llama, batch, seeds=(3, 4)).measured_on == batch.measured_on(llama, seed=3)


def test_parts_of_two_origins_are_refused(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    contraction = measure_contraction(llama, ids, seeds=(0,))
    for other in (block_influence(llama, ids[:1]), block_influence(make_tiny("llama", seed=1), ids)):
        with pytest.raises(LyapunovPruneError, match="two models or texts"):
            LayerProfile(contraction, other)
    path = LayerProfile(contraction, block_influence(llama, ids)).save(tmp_path / "profile.json")
    mixed = json.loads(path.read_text())
    mixed["influence"]["measured_on"]["text_hash"] = "0"
    path.write_text(json.dumps(mixed))
    with pytest.raises(LyapunovPruneError, match="two models or texts"):
        LayerProfile.load(path)


def test_a_kept_profile_is_measured_once(
    llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two seeds, as `profile_layers` measures; anew for other seeds, another way, and where that is asked for."""
    made = []

    def counted(*arguments: Any, **options: Any) -> LayerProfile:
        made.append(options)
        return profile_layers(*arguments, **options)

    monkeypatch.setattr(profile, "profile_layers", counted)
    batch = TokenBatch(ids, "a book", "calibration", False)
    path = tmp_path / "profile.json"
    found = kept_profile(path, llama, batch)
    assert found.contraction.seeds == (0, 1)
    wanted = profile_layers(llama, batch, seeds=(0, 1)).contraction
    np.testing.assert_allclose(found.contraction.rho, wanted.rho)
    assert (found.contraction.epsilon, found.contraction.method, found.contraction.pooling) == (
        wanted.epsilon,
        wanted.method,
        wanted.pooling,
    )
    kept_profile(path, llama, batch)
    assert len(made) == 1
    kept_profile(path, llama, batch, seeds=(0,))
    kept_profile(path, llama, batch, seeds=(0,), how={**HOW, "pooling": "token"})
    kept_profile(path, llama, batch, seeds=(0,), how={**HOW, "pooling": "token"})
    assert len(made) == 3  # once each: two seeds, one seed, another pooling


def test_a_table_has_both_measurements_of_every_layer(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = profile_layers(llama, ids, seeds=(0,))
    frame = found.to_frame()
    np.testing.assert_array_equal(frame["rho"], found.contraction.rho)
    np.testing.assert_array_equal(frame["block_influence"], found.influence.influence)
