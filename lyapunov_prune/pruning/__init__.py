"""Remove layers or hidden channels, and show that it is right.

- `plan`: the decision; `removed`: the kinds of what goes;
- `width`: which hidden channels are removed;
- `edit`: what a plan makes of a config, and where the tensors of that model come from, in memory and in files;
- `surgery`: what a plan removes and what replaces it, and the cut, not checked yet;
- `gate`: compares a reference with a result; `removal`: cut and check in memory, by four checks, with `counting`;
- `alone`: what stands beside every removal, the whole model rounded to the same bytes;
- `provenance`: the record of a pruned checkpoint, `stored`: the words of its format.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
