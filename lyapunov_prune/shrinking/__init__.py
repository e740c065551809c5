"""One call from a model to a smaller one: choose layers, mend, heal, each step kept only where it pays.

- `target`: how much goes: layers, a share of the parameters, or what may be lost; and how many layers that is;
- `request`: what is asked, and the time that is left for it;
- `cost`: how long it will take here, and how much memory and disk, before it starts;
- `texts`: what teaches, what judges, and what no step sees;
- `choosing`: which layers go, and whether mending pays; `within`: how many, where the target is what may be lost;
- `shrink`: all steps, one after the other, with `healing` and `evaluated`, what it measures on text that no step saw;
- `written`: the smaller model as a checkpoint, with the commands that would do the same by hand;
- `report`: what was done and what it is worth.

A new target is a case in `target.Target.of`, and one in `target.count_for` or, of what may be lost, in `within`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
