"""A pruned model learns from the dense one what the removed layers did.

- `heal`: the run; `distillation`: its loss and its step; `low_rank`: updates trained beside the weights;
- `sharded`: layers in parts, of which every process holds its own;
- `trained`: what is trained, and in which order it is shown what;
- `state`: the run on disk, taken up again after `kill -9`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
