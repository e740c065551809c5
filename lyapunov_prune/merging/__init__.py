"""Merge a feed-forward block without its activation: two linear maps in a row are one.

- `table`: the reductions by name; `reductions`: the linear map that replaces the hidden vector, from calibration sums;
- `merge`: the product in float64, rounded once; `replaced`: the same without a product, by hooks, as a reference;
  `unmerged`: a model that is trained as if it were cut, and merged afterwards. `pruning` puts the matrix in place of
  the block.

A new reduction is a function from the tensors of a block and sums over its inputs to a `HiddenMap`, in `reductions`,
with a row in `table.REDUCTIONS`; a new sum goes into `SUMS` of `calibration.blocks`.
"""
