"""Scores into an order into a plan.

- `criteria`: every criterion by name, and what is refused of it; `rank`: measure what a criterion goes by, and rank;
- `ranking`: what each gives, and the scores of ρ, Block Influence, their blend, and the controls;
- `kl`, `angular`, `oracle`: criteria that measure more;
- `best`: the sets that all of them propose (`candidates`), checked by the loss, and a search from there;
- `tried`: what such a search has tried;
- `stability`: how often a layer is picked when the windows are drawn anew, and ties;
- `budget`: as many layers, or parts of layers, as a divergence allows; `amount`: as much of every matrix.

A new criterion gets a row in `criteria.CRITERIA`, which the command line, its help and the tests read, and its name in
`cli.choices`; if it measures what no other does, also a function in `rank.MEASURES`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
