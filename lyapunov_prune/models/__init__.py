"""Everything that depends on a model family; no other room asks for a model's name or `model_type`.

- `decoder`: the handle that every room takes; `structure`: where a decoder keeps its layers; which model it is;
- `loading`: a model by any name, in memory; by `from_folder`, `hub` and `gguf`, the built-in one among the last;
  `folder`, `weight_files`, `adapter_folder`, `expansion`: what a checkpoint, its weights, an adapter's folder and a
  tokenizer must be before transformers reads them; `cache`: what GGUF files were dequantised to; `packed`: which packed
  integers are unpacked on loading; `quantised`: those that stay packed, and what may be asked of them;
  `quantised_names`: the layers that a quantisation's settings name;
- `gguf_header`, `gguf_layers`: what a GGUF file says, and what of it speaks of single layers; `gguf_copy`,
  `gguf_tensors`: such a file written, of the bytes of another and of tensors in memory; `gguf_metadata`,
  `gguf_vocabulary`: what its header says of a model and of a tokenizer;
- `device`: the CPU or a GPU, and the memory there; `dispatched`: several of them, and the disk; `launched`: several
  processes; `kernels`: by which attention and experts are computed;
- `digest`, `settings`: what tells a model's weights and its forward from others; `tokenizers`: what tells two that read
  alike;
- `adapters`, `plain`, `wrappers`: what a model must be for its weights to be changed; `pictures`: a prompt with a
  picture, for one that reads them;
- `stored_names`, `left_out`: which tensor of the files fills which of the model, and which of them it was loaded
  without;
- `projections`, `roles`: its matrices, and what each does; `experts`: those kept in one tensor, and what the router
  sends them; `left_alone`: what else layers hold, and why no method takes it; `mixtures`: experts and router of every
  layer, and how some leave; `feedforward`: the block between attention and the next layer, `width`: its hidden
  channels; `kinds`: which layers are alike; `positions`: at which lengths of a text its positions change;
- `streamed`: what has to be known of a model whose layers are read from its files one at a time;
- `held`, `hooked`: a model for one thread, and hooks on it, for as long as a block lasts;
  `sharing`: two models that hold the same numbers hold them once;
- `compact`, `modeling_compact`: models without some attentions, with merged blocks, with two factors a matrix;
  `deci`: those that engines know;
- `recurrence`: the states that layers carry from token to token, in a cache or in modules;
- `classifiers`, `classifier_loading`: models of images;
- `engines`: what serving engines would take its layers for;
- `layer_settings`, `adaptations`, `held_together`, `families`: what removing layers asks of a config and of a family.

A new family usually needs nothing. If the gate refuses it, its row goes into `families` and its rule into
`adaptations`, or `held_together` where layers read one another; tests/families puts every family through every
contract.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
