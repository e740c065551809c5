"""What a matrix can be replaced by, and a model with every matrix replaced.

- `methods/`: one file per method; `table` lists them by name; `method`: their base classes; `masks`, `grids`,
  `second_order`: what several share;
- `recipe`: how every matrix of a model is compressed, and the loop over layers; `compress`: applies it to a copy of the
  model in memory; `report`: the result; `described`: what it says of one matrix;
- `asking`: amounts and options that a method or a schedule does not take, refused without torch.

A new method is a file in `methods` and a row in `table.METHODS`; docs/adding/method.md shows one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
