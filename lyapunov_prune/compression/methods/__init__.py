"""What a matrix can be replaced by, one file a method; `compression.table.METHODS` lists them."""
