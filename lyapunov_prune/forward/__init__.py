"""Run all of a model, part of it, or a changed one.

- `reading`: a model with a batch, made once a measurement and passed on; `dealing`: its windows over several processes;
- `hooks`: observe the residual stream, inject into it, skip layers; `prefix`: a forward that begins at any layer;
- `products`: the input and output of a matrix, even if its module is not called;
- `rounding`: the coarsest dtype that the layers compute in, and whether they select experts or tokens;
- `anatomy`: attention and MLP of a layer, where they enter and leave the stream, and what stands in the place of an
  attention that leaves; `branches`: one run alone, and the parameters that make its output;
- `masking`: hidden channels of feed-forward blocks, and experts, masked;
- `replacement`, `changes`: other weights, or a changed layer, inside a block;
- `scoring`, `logits`, `decoding`: losses, logits and greedy tokens; `kept`: the logits of two models, compared a block
  of positions at a time;
- `states`: each layer run on the output of the changed layers before it; the states of a text at all boundaries, on
  disk if they do not fit in memory, and final states of a changed model;
- `own_text`: text that the model writes itself, for calibration;

Nothing here outlasts its block: hooks are removed and weights restored, also after an error.
"""
