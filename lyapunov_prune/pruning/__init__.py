"""Remove layers or hidden channels, and show that it is right.

- `plan`: the decision, `plan_fields`: what it may hold; `mergekit`: one in mergekit's words; `operation`: what it takes
  out and what stands in for it;
- `width`: which hidden channels go;
- `surgery`, `zeroing`, `mirroring`: the cut, which proves nothing;
- `gate`: a reference and a result held against each other; `removal_gate`: the four checks of a removal, by `counting`
  and `merge_gate` (merged and mended matrices);
- `removal`: cut and proven, in memory; `provenance`: what a pruned checkpoint says of itself,
  `stored`: in which words of its format;
- `curve`: perplexity over layers removed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
