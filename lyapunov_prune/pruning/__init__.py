"""Remove layers, prove that it is right, write the result.

- `plan`: the decision; `mergekit`: one in mergekit's words; `operation`: what it takes out and what stands in for it;
- `surgery`, `zeroing`, `mirroring`: the cut, which proves nothing;
- `gate`: a reference and a result held against each other; `removal_gate`: the four checks of a removal, by `counting`
  and `merge_gate` (merged and mended matrices); `compact_gate`, `disk_gate`: those of a compact model and of files;
- `removal`: cut and proven, in memory; `checkpoint`: cut, proven and written, in either format; `provenance`: what the
  checkpoint says of itself; `on_disk`: without loading the model;
- `compact`: the cut in a format of its own, attentions gone and feed-forward blocks merged; `compact_checkpoint`: such
  a cut that no plan tells, written; `curve`: perplexity over layers removed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
