"""How a change of a model affects the hidden state, the logits and the probabilities.

- `divergence`: skipping one layer; `tiles`: the same measures, one block of the vocabulary at a time;
- `spaces`: the measures of whole rows;
- `hierarchy`: h → z → p at each decoding step, kept in `hierarchy_probe`, with error bounds of its angles;
- `generation`: both models write their own text; `history`: one reads the other's text;
- `choices`: both models answer the same items, compared in `choice_comparison`;
- `verdict`: which kinds of task a compression spares.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
