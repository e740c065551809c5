"""A profile's two parts are of one model and one text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.influence import block_influence
from lyapunov_prune.profiles.profile import LayerProfile, profile_layers


def test_a_profile_knows_what_it_was_measured_on(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    batch = TokenBatch(ids, "a book", "calibration", False)
    assert profile_layers(llama, batch, seeds=(3, 4)).measured_on == batch.measured_on(llama, seed=3)


def test_parts_of_two_origins_are_refused(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    contraction = measure_contraction(llama, ids, seeds=(0,))
    for other in (block_influence(llama, ids[:1]), block_influence(make_tiny("llama", seed=1), ids)):
        with pytest.raises(LyapunovPruneError, match=r"are of two models or texts; measure both"):
            LayerProfile(contraction, other)
    path = LayerProfile(contraction, block_influence(llama, ids)).save(tmp_path / "profile.json")
    mixed = json.loads(path.read_text())
    mixed["influence"]["measured_on"]["text_hash"] = "0"
    path.write_text(json.dumps(mixed))
    with pytest.raises(LyapunovPruneError, match=r"profile\.json does not fit .*two models or texts"):
        LayerProfile.load(path)
