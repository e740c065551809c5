"""Where layers get other numbers, GPT-2's scale by the number of the layer matters."""

from __future__ import annotations

import pytest
from helpers import KINDS


@pytest.fixture(params=[*KINDS, "gpt2-inverse-layer"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param
