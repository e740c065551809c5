"""How layers are ordered for removal, one file a criterion; `ranking.table.CRITERIA` lists them."""
