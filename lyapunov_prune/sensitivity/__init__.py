"""Change one thing at a time and measure the loss.

- `studies/`: one file a study; `table` lists them by name; `study`: what each is; `changes`: what it changes;
- `sweep`: many small changes on one model and one text, none measured twice; `compressor`: the matrices that it puts
  in place;
- `sensitivity`: the map that they give; `drift`: how far the states moved; `amplification`: whether ρ says so.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
