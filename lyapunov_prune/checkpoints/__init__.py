"""The bytes of a checkpoint.

- `tensor_files`: safetensors read and written tensor by tensor; `outline`: a model known from its files alone;
- `streamed`: a model of which one layer at a time is in memory; `layer_stream` reads it from the files, `twin` knows
  what layers are called with; `shards`: written layer by layer;
- `reloading`: what was saved, loaded again and compared; `elsewhere`: the same in a process without this package;
- `beside`: what a checkpoint is besides its weights; `saving`: a changed model written whole or not at all;
- `cards`: the README.md beside the weights, of whatever a checkpoint went through.
"""
