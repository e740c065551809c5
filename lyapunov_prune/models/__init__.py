"""Everything that depends on a model family; no other room asks for a model's name or `model_type`.

- `decoder`: the handle that every room takes; `structure`: where a decoder keeps its layers, and which model it is;
- `names`: what a model can be called;
- `loading`: a model in memory by any name, from the hub, through `from_folder` and `gguf` (which has the built-in
  model); `folder`: checks of a checkpoint before transformers reads it; `cache`: dequantised GGUF files; `quantised`:
  packed weights, unpacked on loading by a `reader` of `table` (in `readers`, one file each) or left to their library;
  `quantised_names`: the layers that their settings name;
- `gguf_header`, `gguf_layers`, `gguf_settings`: the header of a GGUF file, its parts about single layers, and what it
  says of the forward; `gguf_copy`, `gguf_tensors`: writing such a file, from another one's bytes or from tensors;
  `ggml`: its block types, by llama.cpp's own quantiser; `gguf_metadata`, `gguf_vocabulary`: the model and the tokenizer
  in its header;
- `device`: the CPU or a GPU, its memory, and the kernels for attention and experts; `dispatched`: several GPUs;
  `launched`: several processes;
- `digest`, `settings`: identify a model by its weights and by the settings of its forward; `tokenizers`: whether two
  models tokenise alike, and how far a text can grow;
- `adapters`: LoRA adapters in a folder, and merged; `plain`, `wrappers`: conditions for changing a model's weights;
- `weight_files`, `left_out`: which tensor in the files fills which one of the model, and which ones were left out;
- `size`: the bytes of a model's files, and bits a weight; `how`: what a matrix is rounded to;
- `projections`, `roles`: the matrices of a model, what each does, and other weights in the layers, which no method
  takes; `experts`: those stacked in one parameter, and the tokens that the router sends them;
  `mixtures`: experts and router of every layer; `feedforward`: the feed-forward block of a layer,
  `units`, `fused`, `width`: hidden channels of blocks and experts, how fused matrices come apart, and their setting;
  `kinds`: which layers are alike; `positions`: the lengths of a text at which its positions change;
- `streamed`: what other rooms need to know about a model whose layers are read from files one at a time;
- `hooked`: a model reserved for one thread, and hooks on it, inside a block; `rebuilt`: a model of another config;
  `sharing`: two models with equal weights share their memory, and which layers share parameters;
- `compact`, `modeling_compact`: models without some attentions or with merged blocks;
- `recurrence`: the states that layers carry from token to token, in a cache or in modules;
- `engines`: what serving engines would do wrong with its layers;
- `pictures`: models that look at images, and prompts with one;
- `settings`, `adaptations`, `held_together`, `families`: what removing layers requires of a config and a family.

A new family usually needs nothing. If the gate refuses it, add its row to `families` and its rule to `adaptations`, or
to `held_together` if layers read from one another; tests/families puts every family through every contract.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
