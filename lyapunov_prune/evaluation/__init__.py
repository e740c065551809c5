"""How good a model is.

- `perplexity`, `speed`: measured by this package; `tasks`, `harness`: asked through lm-evaluation-harness;
- `repetition`: whether what it writes goes in circles; `evaluation`: what `lyapunov-prune eval` puts together.
"""
