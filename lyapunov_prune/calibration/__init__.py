"""Sums over the inputs of matrices and of feed-forward blocks, layer by layer.

- `statistics`: the sums (norms, Gram matrix, sensitivities); `gathering`: the hooks that compute them;
- `lending`: tokens for experts to which the router sends too few;
- `streaming`: one layer at a time, so that later layers see the changes of earlier ones;
- `gram`: damped Gram matrices and their roots;
- `downstream`: how far an error at a matrix's output moves the prediction, token by token;
- `blocks`: inputs and hidden vectors of feed-forward blocks, and sums over them.
"""
