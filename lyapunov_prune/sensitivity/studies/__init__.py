"""What is changed one thing after another, one file a study; `sensitivity.table.STUDIES` lists them."""
