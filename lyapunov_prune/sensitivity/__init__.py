"""Change one thing at a time and measure the loss.

- `studies/`: one file per study; `table` lists them by name; `study`: their base class; `changes`: what a study
  changes;
- `sweep`: many small changes of one model on one text, none measured twice; `compressor`: the compressed matrices;
- `sensitivity`: the result; `drift`: how far the states moved.

A new study is a file in `studies` and a row in `table.STUDIES`; docs/adding/study.md shows one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
