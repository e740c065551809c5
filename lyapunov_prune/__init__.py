"""How compression errors propagate through a transformer language model, and which parts it can do without.

The public names are listed in `__init__.pyi`, for type checkers and `lazy_loader`. Each is imported on first use,
because torch takes seconds to import and `lyapunov-prune --help` does not need it.
"""

from importlib.metadata import version

import lazy_loader

__version__ = version("lyapunov-prune")
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
