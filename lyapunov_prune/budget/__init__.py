"""The best model of a size: a block type for every matrix, by what its rounding costs the prediction.

- `fisher`: how much the prediction minds a change of each weight;
- `cost`: the bytes and the cost of every matrix in every type of llama.cpp;
- `size`: the size that is asked for, `300MB`, `50%` or `4.5bpw`;
- `measured`: what rounding costs, measured one matrix at a time;
- `alone`: what stands beside a removal, the whole model rounded to the same bytes;
- `spend`: all steps, from a model to a GGUF file of that size and what it lost;
- `spent`: the result.

A new type is a line in `cost.KINDS`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
