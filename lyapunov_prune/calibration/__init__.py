"""Sums over the inputs of matrices and of feed-forward blocks, layer by layer.

- `statistics`: what is summed (norms, Gram matrix, sensitivities); `gathering`: the hooks that sum it;
- `streaming`: through the model one layer at a time, so that later layers see what was changed before them;
- `norms`: the sizes of inputs alone, in one forward; `gram`: Gram matrices damped, and their roots;
- `blocks`: what goes through feed-forward blocks, and sums over it.
"""
