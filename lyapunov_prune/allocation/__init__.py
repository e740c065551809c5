"""How a budget is distributed: the amount of compression of every matrix, with the budget as their mean.

- `allocation`: the result; `fitting`: scale or shift targets to meet the budget; `table`: the schedules by name,
  `schedules`: their functions;
- one file per schedule: `uniform`, `owl`, `alpha_pruning`, `atp`, `lyapunov`, `guidelines`, `bits`.

A new schedule is a function from a model and a budget to an `Allocation`, in a file of its own, a row in
`table.SCHEDULES`, which help texts, model cards, docs/choices.md and the tests read, and one in `schedules`; its name
goes into `cli.choices`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
