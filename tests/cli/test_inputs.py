"""How commands turn their options into inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lyapunov_prune.cli.inputs import windows_at_once


@pytest.mark.parametrize(
    ("device", "streamed", "context", "windows"),
    [("cpu", False, 512, 1), ("cuda", False, 512, 8), ("cuda", False, 10_000, 1), ("cuda", True, 512, 1)],
)
def test_a_gpu_takes_windows_together(device: str, streamed: bool, context: int, windows: int) -> None:
    place = SimpleNamespace(device=SimpleNamespace(type=device))
    loaded: Any = SimpleNamespace(model=place, stream=object() if streamed else None)
    assert windows_at_once(loaded, context) == windows
