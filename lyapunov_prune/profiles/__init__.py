"""What each layer does to the state and to an error in it.

- `propagation`: follow an error through the layers; `contraction`: the factor ρ, as a `contraction_profile`;
- `influence`: the angle by which a layer, or its attention or MLP alone, turns the state;
- `expert_use`: the tokens, weights and outputs of each expert;
- `profile`: contraction and influence in one result.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
