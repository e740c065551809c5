"""What a measurement is, and how it is kept.

- `result`: the base of every result (frozen, prints as a table, saves to and loads from one JSON file), and what a
  number was measured on; `arrays`: the numbers that a later step reads in one;
- `history`: how a model was made, and what the steps saw; `overlap`: how much a text shares with that;
- `once`: a result read back instead of measured, where it was asked exactly the same;
- `frames`: pandas, imported when the first table is made;
- `files`: files and folders that appear whole or not at all;
- `store`: finished jobs on disk, one line each, for work that must survive `kill -9`; `claim`: whose folder it is.

A new result is a frozen dataclass that derives from `Result` and ends with `measured_on`.
"""
