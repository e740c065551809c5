"""Theorems, the checkers that rest on them, and checks of a whole model.

- `bound_check`: one check; `checkers`, `probability`, `decision`, `choice`: one checker a theorem;
- `approximation`, `approx_linear`, `approximate`, `trajectory`: matrices that check themselves on every forward, and
  states side by side;
- `check`, `written`, `report`: a model put through a grid of settings, or held against what was made of it, and the
  result, with `distribution` and `alignment`;
- `theorems`: the registry of what is proven in `lean/`.

A new theorem gets a row in `theorems` with the digest of its statement, and a checker that names it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
