"""Train a pruned model to predict what the dense model predicts.

- `heal`: the run from end to end; `report`: what it did, and which weights were kept;
- `rounds`: the next learning rate, when to go back, when to stop; `training`: the learner, in judged rounds;
- `distillation`: the loss, one step, and the sizes of parameters, to which learning rates are relative;
- `low_rank`: low-rank updates trained beside the weights; `sharded`: sharded layers;
- `trained`: which parameters are trained, and the order of the data;
- `memory`: what a step needs; `state`: the training state on disk, resumed after `kill -9`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
