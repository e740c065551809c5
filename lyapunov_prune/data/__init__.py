"""Texts as batches of tokens, and images as batches of pixels.

- `sources`: what names a text; `text`: a text, cut into calibration and evaluation halves, as windows of tokens;
- `rows`: lines of files, rows of JSON files, tables and data sets; `documents`: the plain text or chats in them;
- `batch`: the windows, checked against a model;
- `images`: images with their classes, checked against a model;
- `examples`: what text and images have in common, and three disjoint parts of either;
- `unseen`: refuses to score a model on what it was made with;
- `choices`: multiple-choice items and questions from JSONL files.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
