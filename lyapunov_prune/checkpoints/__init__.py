"""Reading and writing the files of checkpoints.

- `tensor_files`: safetensors read and written tensor by tensor; `outline`: a model known from its files without weights
  in memory;
- `streamed`: a model with one layer at a time in memory; `layer_stream` reads it from the files, and finds
  the arguments of its layers;
- `reloading`: a saved model is loaded again and compared, also in a process without this package;
- `beside`: the files of a checkpoint besides its weights; `saving`: a changed model written whole or not at all, a
  streamed one layer by layer;
- `cards`: the README.md of a checkpoint.
"""
