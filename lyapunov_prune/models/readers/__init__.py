"""How packed matrices become plain ones, one file a reader; `models.table.READERS` lists them."""
