"""Compression methods, one file each; `compression.table.METHODS` lists them."""
