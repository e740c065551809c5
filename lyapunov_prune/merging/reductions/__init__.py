"""Reductions of a feed-forward block, one file each; `merging.table.REDUCTIONS` lists them."""
