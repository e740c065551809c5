"""Remove layers, prove that it is right, write the result.

- `plan`: the decision; `surgery`, `zeroing`: the cut, which proves nothing; `gate`, `counting`: the four checks,
  once on each path;
- `removal`: cut and proven, in memory; `checkpoint`: cut, proven and written; `on_disk`, `disk_gate`: the same without
  loading the model; `curve`: perplexity over layers removed;
- `compact`: attentions gone and feed-forward blocks merged, in memory; `compact_gate`: the checks of that;
  `compact_checkpoint`: cut, proven and written in a format of its own.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
