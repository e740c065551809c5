"""Sums over the inputs of matrices, layer by layer.

- `statistics`: what is summed (norms, Gram matrix, sensitivities); `gathering`: the hooks that sum it;
- `streaming`: through the model one layer at a time, so that later layers see what was changed before them;
- `norms`: the sizes of inputs alone, in one forward.
"""
