"""From scores to an order to a plan.

- `criteria/`: one file a criterion; `table` lists them by name, and says which is the default and which ranks what;
  `criterion`: what each is, and what those that give scores share; `counts`: how many layers can go, and which;
- `rank`: measure what a criterion goes by, and rank; `measured`: rank by what was measured before;
- `ranking`: the order, and the plan that follows;
- `angular`, `oracle`, `best`: what the criteria of those names measure; `search`: how `best` searches,
  `candidates`: the sets that it tries first, `tried`: what it has tried;
- `experts`: scores of the experts of every layer, and the plan that removes as many from each;
- `stability`: how often a layer is picked when the windows are resampled, and ties.

A new criterion is a file in `criteria` and a row in `table.CRITERIA`; docs/adding/criterion.md shows one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
