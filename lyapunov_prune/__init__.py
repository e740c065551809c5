"""How compression errors travel through a transformer language model, and what it can do without.

The public names are written down in `__init__.pyi`, for type checkers and for `lazy_loader`: each is imported on first
use, as torch takes seconds and `lyapunov-prune --help` needs none of it.
"""

from importlib.metadata import version

import lazy_loader

__version__ = version("lyapunov-prune")
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
