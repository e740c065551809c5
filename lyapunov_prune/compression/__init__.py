"""What a matrix can be replaced by, and a model with every matrix replaced.

- one file a method, named as the method: `magnitude`, `weight_only`, `wanda`, `sparsegpt`, `svd`, `whitened_svd`,
  `balanced`, `rtn`; `masks` and `gram` hold what several share; `methods`: all of them by name;
- `compress`: every matrix of a model, layer by layer; `comparison`: several compressions side by side.

A new method is a function from a matrix (and what calibration tells of its inputs) to a matrix, in a file of its own,
and a row in `methods.METHODS`, which the command line and the tests read; its name goes into `cli.choices`, for help.
"""
