"""Results of measurements and how they are stored.

- `result`: the base class of every result (frozen, prints as a table, one JSON file each) and the metadata of a
  measurement; `encoding`: its fields as JSON values; `arrays`: checks of the numbers that a later step reads;
- `history`: how a model was made, and the texts that the steps saw; `overlap`: how much a text shares with those;
- `frames`: pandas, imported with the first table, and fields of a record as its columns; `wording`: lists of layers,
  bars and intervals as words;
- `files`: files and folders written whole or not at all;
- `store`: a result read instead of measured again, if all parameters are the same, and finished jobs on disk, one line
  each, which survive `kill -9`; `claim`: where unfinished work is kept, by its settings.

A new result is a frozen dataclass that derives from `Result` and ends with `measured_on`.
"""
