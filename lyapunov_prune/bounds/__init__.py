"""Theorems, the checkers that rest on them, and checks of a whole model.

- `bound_check`: the result of one check; `checkers`, `probability`, `decision`, `choice`: one checker per theorem;
- `approximation`, `approx_linear`, `approximate`, `trajectory`: matrices that check themselves on every forward, and
  the dense and the approximated states side by side;
- `growth`: what the theorems allow an error that grows as measured; the composed bound with one factor before a layer
  and another behind it;
- `check`, `written`, `report`: check a model under a grid of settings, or a checkpoint made from it; the result, with
  `alignment`;
- `matrix_errors`: compressed matrices each on its own, on the inputs of the dense model;
- `theorems`: the registry of what is proven in `lean/`.

A new theorem gets a row in `theorems` with the digest of its statement, and a checker that names it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
