"""How good a model is.

- `perplexity`, `score`, `speed`: measured by this package;
- `tasks`: run with lm-evaluation-harness, whose model is `harness` and whose tasks `harness_tasks`; `task_scores`: what
  they give;
- `sizes`: those that were tried, with what each costs;
- `judging`: whether a change pays, by a paired test over windows;
- `llama_cpp`: runs llama.cpp on GGUF files in the process `llama_cpp_process`; `engine`: its perplexity and speed;
- `repetition`: whether generated text repeats itself; `evaluation`: the result of `lyapunov-prune eval`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
