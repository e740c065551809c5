"""What draws a result. Figures are made in a room above this one, so the package names it here when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

figures_of: Callable[[Any], Any]
