"""How compression errors propagate through a transformer language model, and which parts it can do without.

The public names are listed in `__init__.pyi`, for type checkers and `lazy_loader`. Each is imported on first use,
because torch takes seconds to import and `lyapunov-prune --help` does not need it.
"""

from importlib.metadata import version
from typing import Any

import lazy_loader

from lyapunov_prune.results import drawing as _drawing

__version__ = version("lyapunov-prune")
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _figures_of(result: Any) -> Any:
    from lyapunov_prune.report.figures import figures_of

    return figures_of(result)


_drawing.figures_of = _figures_of
