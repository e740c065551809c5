"""A feed-forward block without its activation: two linear maps in a row, which are one.

- `table`: by what linear map the hidden vector is replaced, by name; `reductions`: the map, from calibration sums;
- `merge`: the product in float64, rounded once; `replaced`: the same without a product, by hooks, as a reference;
  `unmerged`: a model that is trained as if it were cut, and merged afterwards. `pruning` puts the matrix where the
  block was.

A new reduction is a function from the tensors of a block and sums over its inputs to a `HiddenMap`, in `reductions`,
with a row in `table.REDUCTIONS`; a sum that nobody takes yet goes into `SUMS` of `calibration.blocks`.
"""
