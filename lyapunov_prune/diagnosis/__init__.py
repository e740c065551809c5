"""What is broken in a file, and which tensor: faults that are no honest rounding, told in one sentence each.

- `finding`: what a test finds, and the result that holds all of it;
- `table`: the tests by name, of a file against its dense model.

A new test is a function and a row in `table`, with its fault, statistic, threshold and rate of false alarms in its
docstring, and an example planted in `tests/diagnosis`.
"""
