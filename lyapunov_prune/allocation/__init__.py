"""How much goes where: the amount of compression of every matrix, in the mean a budget.

- `allocation`: the decision; `fitting`: the arithmetic that makes its sum right; `schedules`: all of them by name;
- one file a schedule: `uniform`, `owl`, `alpha_pruning`, `atp`, `lyapunov`, `guidelines`, `bits`.

A new schedule is a function from a model and a budget to an `Allocation`, in a file of its own, and a row in
`schedules.SCHEDULES`, which the command line and the tests read; its name goes into `cli.choices`, for help.
"""
