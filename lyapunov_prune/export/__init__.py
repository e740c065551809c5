"""What a model that was pruned or compressed can be written as, each format with its gate.

- `formats/`: one file a format; `table` lists them by name; `format`: what each is;
- `pruned`: a plan carried out, proven and written; `copied`: layers removed file by file, without loading the model,
  with `disk_gate`; `quantised_copy`: layers removed from a quantised checkpoint, by its bytes;
- `gguf`: layers removed from a GGUF file into another, with `gguf_gate`, and `llama_cpp`, which holds it against the
  model; `gguf_original`: the file to begin with; `gguf_whole`: a model in memory as one; `exported`: what that says;
- `streamed`: a compressed model larger than memory, a layer read, compressed and written at a time;
- `compact`: attentions gone and feed-forward blocks merged, in a format of its own; `compact_gate`: its gate, and its
  folder, also of such a cut that no plan tells and of plain models made compact;
- `packed`: rounded weights as packed integers.

A new format is a file in `formats` and a row in `table.FORMATS`; docs/adding/format.md shows one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
