"""One file a format; `export.table` lists them by name."""
