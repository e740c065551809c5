"""Results of measurements and how they are stored.

- `result`: the base class of every result (frozen, prints as a table, one JSON file each) and the metadata of a
  measurement; `axes`: the axes that a field declares, `rho: Annotated[np.ndarray, Per("layer")]`, held when the result
  is made; `arrays`: checks of its numbers; `encoding`: its fields as JSON values;
- `history`: how a model was made, and the texts that the steps saw; `overlap`: how much a text shares with those;
- `frames`: pandas, imported with the first table, and fields of a record as its columns; `drawing`: what makes its
  figures; `wording`: lists of layers, bars and intervals as words; `worth`: what a ratio of perplexities means;
- `files`: files and folders written whole or not at all;
- `store`: a result read instead of measured again, if all parameters are the same, and finished jobs on disk, one line
  each, which survive `kill -9`; `claim`: where unfinished work is kept, by its settings.

A new result is a frozen dataclass that derives from `Result` and ends with `measured_on`.
"""
