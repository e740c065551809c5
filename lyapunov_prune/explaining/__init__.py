"""Where the error of a compressed model comes from: which layers add it, which pass it on, what putting one back gains.

- `pair`: aligns the layers of a dense and a compressed model, and refuses models that cannot be compared;
- `decomposition`: the error after every layer as the sum of what arrived, what the layer added, and what it did to what
  arrived;
- `blame`: KL and loss when one layer alone is compressed, and when all others are;
- `token_kinds`: how far final state, logits and probabilities turn, by kind of token;
- `explanation`: the result; `explain`: measures all of it from shared forwards, and estimates the time.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
