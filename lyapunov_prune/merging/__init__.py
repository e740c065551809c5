"""Merge a feed-forward block without its activation: two linear maps in a row are one.

- `reductions/`: one file per reduction; `table` lists them by name; `reduction`: their base class, and the linear map
  that replaces the hidden vector;
- `merge`: the product in float64, rounded once; `replaced`: the same without a product, by hooks, as a reference;
  `unmerged`: a model that is trained as if it were cut, and merged afterwards. `pruning` puts the matrix in place of
  the block.

A new reduction is a file in `reductions` and a row in `table.REDUCTIONS`; docs/adding/reduction.md shows one.
"""
