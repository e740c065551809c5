"""The best model of a size: a type for every matrix, by what its rounding costs the prediction.

- `fisher`: how much the prediction minds a change of each weight, by `gradients`; `streamed`: the same of a model that
  is read from files, backwards through one layer after the other;
- `storage`: what a model is written as: `blocks`, the block types of a GGUF file, or `schemes`, packed integers in a
  folder;
- `cost`: the bytes and the cost of every matrix in every type;
- `size`: the size that is asked for, `300MB`, `50%` or `4.5bpw`;
- `measured`: what rounding costs, measured one matrix at a time;
- `feedback`: the same types written better, later columns making up for the errors of earlier ones;
- `alone`: what stands beside a removal, the whole model rounded to the same bytes;
- `spend`: all steps, from a model to a file or folder of that size and what it lost;
- `spent`: the result.

A new type is a line in `blocks.KINDS` or `schemes.SCHEMES`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
