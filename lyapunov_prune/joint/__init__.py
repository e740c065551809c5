"""How many attentions and how many activations go together, by the score that is left after recovery.

Gradients of the two types are never compared: an order exists within a type, and how many of each go is read off a map.

- `importance`: what each part is worth within its type, the order in which layers go;
- `chains`, `recovery`, `points`: which pairs are recovered, how one is, and all of them, as jobs in a store;
- `map`: a polynomial in the two removed shares, through the scores of recovered models; its degree is tried on points
  that the fit has not seen;
- `decision`: the pair within a budget that the map puts first, what noise leaves of that, and what it can cost;
- `times`: what a budget of time goes by; `run`, `result`: all of it from end to end, and what it leaves behind; `card`:
  what the model's card says of it.

Another predictor is a result with the `predict`, `interval`, `contrast` and `residual` of `JointMap`; another budget is
a case in `decision.within_budget`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
