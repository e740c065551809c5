"""Text into token batches, and images into theirs.

- `text`: a source of text, cut into calibration and evaluation halves, as windows of tokens;
- `rows`: rows of JSON files, tables and data sets; `documents`: what they hold, plain text or chats;
- `batch`: the windows themselves, checked against a model;
- `images`: images with their classes, checked against a model; `image_files`: where they are read from;
- `examples`: what holds of text and images both; `slices`: three parts of either that share nothing;
- `prompts`: prompts of one's own, each of its own length;
- `unseen`: what a model must not be scored on, because it was made with it;
- `choices`, `tasks`: multiple-choice items and questions from JSONL files; `retrieval`: queries and documents;
- `lines`: how a line of others is read.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
