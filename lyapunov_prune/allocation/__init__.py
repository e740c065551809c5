"""How much goes where: the amount of compression of every matrix, in the mean a budget.

- `allocation`: the decision; `fitting`: the arithmetic that makes its sum right; `schedules`: all of them by name;
- one file a schedule: `uniform`, `owl`, `alpha_pruning`, `atp`, `lyapunov`, `guidelines`, `bits`.

A new schedule is a function from a model and a budget to an `Allocation`, in a file of its own, and a row in
`schedules.SCHEDULES`, which the command line, its help and the tests read.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
