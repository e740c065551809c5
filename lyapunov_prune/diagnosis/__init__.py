"""What is broken in a file, and which tensor: faults that are no honest rounding, told in one sentence each.

- `finding`: what a test finds, and the result that holds all of it;
- `sides`: a dense model and a file of it, tensor by tensor; `compared`: one pass over a tensor of both;
- `faults`: what can have been done to a matrix by mistake; `settings`: the same of config, tokenizer and template;
- `known`: these tests, and what makes such faults; `diagnose` runs them;
- `shares`: how much of the error each finding explains, by putting it right alone;
- `stored`: a file alone, as it lies on disk; `statistics`: one pass over its bytes; `packed`: integers in words;
  `expected`: what its config says it holds; `looked`: all of this for the tests;
- `by_bytes`, `by_names`: the tests of one file; `check_file` lists and runs them.

A new test is a function and a row in `known` or, of a file alone, in `check_file`, with its fault, statistic, threshold
and rate of false alarms in its docstring, and an example planted in `tests/diagnosis`.
"""
