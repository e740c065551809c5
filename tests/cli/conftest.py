"""Every command that takes a model, one after the other."""

from __future__ import annotations

import pytest
from helpers import COMMANDS


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> list[str]:
    return COMMANDS[request.param]
