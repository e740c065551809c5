"""Where the error of a compressed model comes from: which layers add it, which pass it on, what putting one back gains.

- `pair`: a dense and a compressed model whose layers are aligned, and what is refused;
- `decomposition`: the error behind every layer as the sum of what arrived, what the layer added, and what it did to
  what arrived;
- `sublayers`: the same for attention and MLP;
- `blame`: KL and loss when one layer alone is compressed, and when all others are;
- `token_kinds`: from the final state to the prediction, by kind of token;
- `kv_cache`: a model whose keys and values are rounded, in the place of a compressed one;
- `explanation`: the result; `explain`: both of them measured from the same forwards; `cost`: what that takes, said
  first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
