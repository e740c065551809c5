"""Text into token batches, and images into theirs.

- `text`: a source of text, cut into calibration and evaluation halves, as windows of tokens;
- `batch`: the windows themselves, checked against a model;
- `images`: images with their classes, checked against a model; `examples`: what holds of both;
- `choices`, `tasks`: multiple-choice items and questions from JSONL files.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
