"""What a matrix can be replaced by, and a model with every matrix replaced.

- `methods/`: one file a method; `table` lists them by name; `method`: what each is; `masks`, `grids`, `second_order`:
  what several share;
- `recipe`: what is to be done to every matrix of a model, and the loop over layers that does it; `compress`: done to a
  copy of it in memory; `report`: what came of it;
- `held_out`: what a compression costs, for schedules that search; `rounding_cost`: what bits cost, for those that share
  them out; `amount`: as much of every matrix as a divergence
  allows.

A new method is a file in `methods` and a row in `table.METHODS`; docs/adding/method.md shows one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
