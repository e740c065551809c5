"""What a feed-forward block becomes, one file a reduction; `merging.table.REDUCTIONS` lists them."""
