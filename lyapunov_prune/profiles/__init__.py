"""What each layer does to the state and to an error in it.

- `propagation`: an error followed through the layers; `contraction`: the factor ρ made of it, a `contraction_profile`;
- `influence`, `sublayer_influence`: how far a layer, or its attention or MLP alone, turns the state;
- `sublayer_growth`: growth of error and state through attention and MLP, of which a layer's ρ is the product;
- `profile`: contraction and influence in one result; `activations`, `jacobian`: what may explain them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
