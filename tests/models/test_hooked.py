"""Hooks: when they are called, what they may change, and that none outlives its block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import hooks_of
from torch import nn

import lyapunov_prune
from lyapunov_prune.models.hooked import hooked


class Double(nn.Module):
    def forward(self, x: torch.Tensor, plus: float = 0.0) -> torch.Tensor:
        return 2 * x + plus


def test_hooks_see_keywords_run_in_order_and_may_change_what_passes() -> None:
    module, seen = Double(), []

    def early(m: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        seen.append(kwargs["plus"])
        return (args[0] + 1,), {"plus": 10.0}

    def late(m: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["plus"])

    def leaving(m: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        seen.append(float(output))
        return output + 100

    with hooked(before=[(module, early), (module, late)], after=[(module, leaving), (module, leaving)]):
        assert module(torch.tensor(1.0), plus=5.0) == 214
    assert seen == [5.0, 10.0, 14.0, 114.0]
    assert module(torch.tensor(1.0)) == 2


def test_no_hook_outlives_an_exception() -> None:
    module = Double()

    def fails(*call: Any) -> None:
        raise RuntimeError("planted")

    for one in ({"before": [(module, fails)]}, {"after": [(module, fails)]}):
        with pytest.raises(RuntimeError, match="planted"), hooked(**one):  # type: ignore[arg-type]
            module(torch.ones(1))
        assert hooks_of(module) == 0


def test_none_stays_when_not_all_can_be_installed() -> None:
    module = Double()

    def broken() -> Iterator[Any]:
        yield module, lambda *call: None
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), hooked(before=[(module, lambda *call: None)], after=broken()):
        pass
    assert hooks_of(module) == 0


def test_nothing_else_in_the_package_installs_a_hook() -> None:
    """But for the module of compact checkpoints, which runs without the package."""
    files = Path(lyapunov_prune.__file__).parent.rglob("*.py")
    hooking = {path.name for path in files if "register_forward" in path.read_text(encoding="utf-8")}
    assert hooking == {"hooked.py", "modeling_compact.py"}
