"""How good a model is.

- `perplexity`, `score`, `speed`: measured by this package; `tasks`, `harness`: asked through lm-evaluation-harness;
- `judging`: whether a change pays, by a paired comparison over windows;
- `retrieval`: documents found by their embeddings, scored by ir-measures;
- `repetition`: whether what it writes goes in circles; `evaluation`: what `lyapunov-prune eval` puts together.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
