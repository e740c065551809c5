"""How a budget is distributed: the amount of compression of every matrix, with the budget as their mean.

- `schedules/`: one file per schedule; `table` lists them by name; `schedule`: their base class; `allocate` calls one;
- `allocation`: the decision; `fitting`: the arithmetic that makes its sum right;
- `knapsack`: the least cost of any choices within a budget.

A new schedule is a file in `schedules` and a row in `table.SCHEDULES`; docs/adding/method.md shows one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
