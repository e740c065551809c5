"""Everything that depends on how a model family is built."""
