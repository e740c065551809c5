"""What a change does to the hidden state, the logits and the probabilities.

- `divergence`: one layer skipped; `tiles`: its measures, a part of the vocabulary at a time;
- `softmax`, `spaces`: measures of whole rows;
- `hierarchy`: h → z → p at each decoding step; `exits`: where h is read;
- `remainders`: how far the estimates of its angles can be off;
- `generation`, `attention_paths`: two models writing on their own; `history`: one reads the other's text;
- `expectation`: what a measured divergence has meant for perplexity and generated text;
- `choices`: the same items answered by both; `verdict`: which kinds of task are spared.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
