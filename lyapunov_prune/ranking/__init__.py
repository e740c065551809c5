"""Scores into an order into a plan.

- `ranking`: ρ, Block Influence, their blend, and the controls; `kl`, `angular`, `oracle`: criteria that measure more;
- `budget`: as many layers as a divergence allows.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
