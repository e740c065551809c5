"""In this room every listed family is tried, also those that do what others do."""

from __future__ import annotations

import pytest
from helpers import TINY


@pytest.fixture(params=list(TINY))
def family(request: pytest.FixtureRequest) -> str:
    return request.param
