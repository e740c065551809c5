"""Remove layers, prove that it is right, write the result.

- `plan`: the decision; `surgery`, `zeroing`: the cut in memory; `gate`: the four checks; `checkpoint`: what is written;
- `on_disk`, `disk_gate`: the same without loading the model; `curve`: perplexity over layers removed.
"""
