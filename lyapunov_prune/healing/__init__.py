"""A pruned model learns from the dense one what the removed layers did.

- `heal`: the run; `distillation`: its loss and its step; `low_rank`: updates trained beside the weights;
- `state`: the run on disk, taken up again after `kill -9`.
"""
