"""Remove attentions and activations together, with the number of each chosen by the score after recovery.

The importances of the two types are never compared: importance gives an order within a type, and a fitted map decides
how many of each to remove.

- `importance`: the importance of each part within its type, which gives the order of removal;
- `chains`, `recovery`, `points`: which pairs of counts are recovered, one recovery, and all of them as stored jobs;
- `map`: a polynomial in the two removed shares, fitted to the scores after recovery, its degree chosen by
  cross-validation;
- `decision`: the best pair within a budget according to the map, and how far noise can change it;
- `run`: the whole procedure, of which `job` holds what its parts share, `search` decides, and `finish` writes;
  `result`: what it returns.

Another predictor is a result with the `predict`, `interval`, `contrast` and `residual` of `JointMap`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
