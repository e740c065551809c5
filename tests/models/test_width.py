"""Which models have channels that can leave, and the true reason where they cannot."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import make_tiny
from helpers.tiny_models import SMALL, from_settings

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.width import find_blocks


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mixtral", "has experts .*--what experts"),
        ("mamba", "no matrix of a feed-forward block"),
        ("recurrent_gemma", "no setting that is the width"),
        ("bloom", "does not run on a state alone"),
    ],
)
def test_others_are_refused_with_the_reason(family: str, reason: str) -> None:
    settings: dict[str, Any] = {**SMALL, "num_local_experts": 2} if family == "mixtral" else SMALL
    with pytest.raises(LyapunovPruneError) as caught:
        find_blocks(wrap(from_settings(family, **settings)).structure)
    assert re.search(reason, caught.value.message)


def test_blocks_of_several_widths_are_refused() -> None:
    model, wider = make_tiny("llama"), make_tiny("llama", intermediate_size=56)
    wrap(model).layers[2].mlp = wrap(wider).layers[2].mlp
    with pytest.raises(LyapunovPruneError, match="48 to 56 channels"):
        find_blocks(wrap(model).structure)
