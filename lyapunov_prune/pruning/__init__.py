"""Remove layers, prove that it is right, write the result.

- `plan`: the decision; `mergekit`: one in mergekit's words; `surgery`, `zeroing`, `mirroring`: the cut, which proves
  nothing; `gate`, `counting`: the four checks, once on each path;
- `compact`: the cut in a format of its own, attentions gone and feed-forward blocks merged; `compact_gate`: the checks
  of that; `merge_gate`: one more, of merged matrices, in either;
- `removal`: cut and proven, in memory; `checkpoint`: cut, proven and written, in either format; `provenance`: what the
  checkpoint says of itself; `compact_checkpoint`: the same of matrices that no plan tells; `on_disk`, `disk_gate`:
  without loading the model; `curve`: perplexity over layers removed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
