"""Run all of a model, part of it, or a changed one.

- `reading`: a model and its batch, made once a measurement and handed on;
- `hooks`: the residual stream seen, injected into, and layers skipped; `prefix`: a forward that begins at any layer;
- `products`: what enters and leaves a matrix, also where its module is not called;
- `rounding`: the coarsest dtype that the layers compute in, and whether they choose experts or tokens;
- `branches`, `sublayers`: attention and MLP of a layer, run or silenced; `outputs`: what makes their output;
- `channels`: hidden channels of feed-forward blocks masked; `masking`: experts that a router may not choose;
- `replacement`, `changes`: other weights, or a changed layer, for as long as a block lasts;
- `scoring`, `logits`, `decoding`: losses, logits and greedy tokens of what runs; `kept`: logits of two models compared
  a block of positions at a time;
- `layers`: each layer run on what the changed ones before it make;
- `states`: those of a text at all boundaries, on the disk where they do not fit, and final ones of a changed model;
- `own_text`: text that the model writes itself, to calibrate on;
- `continuations`: log-likelihoods of texts that begin alike.

Nothing here outlives its block: a hook is removed and a weight put back, also after an error.
"""
