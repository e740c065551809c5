"""Studies, one file each; `sensitivity.table.STUDIES` lists them."""
