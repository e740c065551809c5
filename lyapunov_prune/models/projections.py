"""Where a decoder keeps the matrices of its layers, and how fused ones come apart.

General rule: every `nn.Linear` and every `Conv1D` (GPT-2's, whose weight is stored transposed) inside a
layer is one matrix. A fused projection is split by its row in the table below, or stays one matrix, for
which every bound holds just as well. Experts that a family keeps as one 3-D parameter are one matrix each.

Left out: embeddings and the language-model head (often one tied tensor, and part of no layer), routers,
convolutions and everything that is no matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.experts import expert_parameters, stored_transposed
from lyapunov_prune.models.plain import require_no_adapters, require_parameters
from lyapunov_prune.models.quantised import require_readable
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import Structure

# Part of a fused matrix: its role, its head (or None), its rows.
Part = tuple[str, int | None, int, int]


@dataclass(frozen=True)
class Projection:
    """One matrix of a layer, output × input: rows `start … stop` of a parameter."""

    name: str  # of the module, with `:part` when it is part of one
    layer: int
    component: str  # its role: the path inside the layer, and the part
    head: int | None
    expert: int | None
    module: str
    parameter: str
    start: int
    stop: int
    transposed: bool  # stored input × output

    @property
    def product(self) -> str:
        """Names the product that the matrix takes part in: parts of a fused matrix share one, experts do not."""
        return self.module if self.expert is None else self.name

    def weight(self, model: nn.Module) -> torch.Tensor:
        """A view of the matrix, output × input, detached."""
        return self.rows(getattr(model.get_submodule(self.module), self.parameter).detach())

    def bias(self, model: nn.Module) -> torch.Tensor | None:
        """A view of what the module adds to the product (output,), detached; None where it adds nothing."""
        bias = getattr(model.get_submodule(self.module), "bias", None)
        return None if bias is None else bias.detach()[self.start : self.stop]

    def rows(self, stored: torch.Tensor) -> torch.Tensor:
        """The view of this matrix in a tensor that is laid out like its parameter."""
        own = stored if self.expert is None else stored[self.expert]
        return (own.T if self.transposed else own)[self.start : self.stop]


def find_projections(decoder: Decoder) -> tuple[Projection, ...]:
    """Every matrix of every layer, in order; of a streamed model as well, whose numbers `weights_of` reads.

    Raises LyapunovPruneError for weights that are no plain matrices (quantised, parametrised) or have adapters.
    """
    require_no_adapters(decoder.model)
    require_readable(decoder.model)
    projections = structure_projections(decoder.structure)
    if not projections:
        raise LyapunovPruneError(
            f"{type(decoder.model).__name__} holds no linear projections in its layers; nothing to check"
        )
    return projections


def weights_of(model: PreTrainedModel, projections: Iterable[Projection]) -> Iterator[tuple[Projection, torch.Tensor]]:
    """`projections`, in the order of the model, each with its weight, in memory until the next one is asked for."""
    for layer, here in groupby(projections, lambda p: p.layer):
        with layer_held(model, layer):
            yield from ((p, p.weight(model)) for p in here)


def by_layer(projections: Iterable[Projection]) -> dict[int, list[Projection]]:
    """The matrices of each layer that has some."""
    found: dict[int, list[Projection]] = {}
    for p in projections:
        found.setdefault(p.layer, []).append(p)
    return found


def structure_projections(structure: Structure) -> tuple[Projection, ...]:
    """Every matrix of every layer of a decoder, or of a classifier of images, in order.

    Raises LyapunovPruneError for weights that are not in memory as plain matrices.
    """
    require_parameters(structure)
    path, kind, config = structure.layers_path, structure.model_type, structure.config
    return tuple(
        p for i, layer in enumerate(structure.layers) for p in layer_projections(layer, i, f"{path}.{i}", kind, config)
    )


def without_numbers(path: str) -> str:
    """The path of a module inside its layer, the same for all experts of a mixture."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def layer_projections(layer: nn.Module, index: int, name: str, model_type: str, config: Any) -> Iterator[Projection]:
    """Every matrix of the layer that is called `name` inside its model, in order; of no name, as inside the layer.

    Raises LyapunovPruneError for weights that are not in memory as plain matrices.
    """
    for path, module in layer.named_modules():
        place = f"{name}.{path}" if name and path else name or path
        role = without_numbers(path)
        if isinstance(module, nn.Linear | Conv1D) and _require_plain(place, module):
            for part, head, start, stop in _parts(model_type, config, path, module):
                suffix = f"{part}{'' if head is None else head}"
                yield Projection(
                    name=f"{place}:{suffix}" if part else place,
                    layer=index,
                    component=f"{role}.{part}" if part else role,
                    head=head,
                    expert=None,
                    module=place,
                    parameter="weight",
                    start=start,
                    stop=stop,
                    transposed=isinstance(module, Conv1D),
                )
        for key, parameter, count in expert_parameters(module):
            transposed = stored_transposed(module, model_type)
            for expert in range(count):
                yield Projection(
                    name=f"{place}.{key}:{expert}",
                    layer=index,
                    component=f"{role}.{key}",
                    head=None,
                    expert=expert,
                    module=place,
                    parameter=key,
                    start=0,
                    stop=parameter.shape[2 if transposed else 1],
                    transposed=transposed,
                )


def _parts_by_head(config: Any, rows: int) -> Iterator[Part]:
    """All queries, all keys, all values, each head after head."""
    heads = config.num_attention_heads
    size = rows // (3 * heads)
    for p, part in enumerate("qkv"):
        for head in range(heads):
            start = (p * heads + head) * size
            yield part, head, start, start + size


def _heads_by_part(config: Any, rows: int) -> Iterator[Part]:
    """Head after head, each its query, key and value."""
    heads = config.num_attention_heads
    size = rows // (3 * heads)
    for head in range(heads):
        for p, part in enumerate("qkv"):
            start = (3 * head + p) * size
            yield part, head, start, start + size


def _grouped(config: Any, rows: int) -> Iterator[Part]:
    """All queries, then the fewer keys and values of grouped-query attention."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    size = rows // (queries + 2 * keys)
    start = 0
    for part, width in (("q", queries * size), ("k", keys * size), ("v", keys * size)):
        yield part, None, start, start + width
        start += width


def _gate_up(config: Any, rows: int) -> Iterator[Part]:
    yield "gate", None, 0, rows // 2
    yield "up", None, rows // 2, rows


# model_type -> last name of the module -> how its rows come apart.
FUSED: dict[str, dict[str, Callable[[Any, int], Iterator[Part]]]] = {
    "bloom": {"query_key_value": _heads_by_part},
    "glm": {"gate_up_proj": _gate_up},
    "glm4": {"gate_up_proj": _gate_up},
    "gpt2": {"c_attn": _parts_by_head},
    "gpt_neox": {"query_key_value": _heads_by_part},
    "mpt": {"Wqkv": _parts_by_head},
    "phi3": {"qkv_proj": _grouped, "gate_up_proj": _gate_up},
}


def _parts(model_type: str, config: Any, path: str, module: nn.Module) -> Iterator[Part]:
    weight: Any = module.weight
    rows = weight.shape[1] if isinstance(module, Conv1D) else weight.shape[0]
    split = FUSED.get(model_type, {}).get(path.rpartition(".")[2])
    return iter([("", None, 0, rows)]) if split is None else split(config, rows)


def _require_plain(name: str, module: nn.Module) -> bool:
    """Raise unless the module multiplies by its weight: not quantised. False for a router.

    Llama 4's is a matrix by class, and returns scores beside the product.
    """
    weight: Any = module.weight
    if not weight.is_floating_point() or weight.ndim != 2:
        raise LyapunovPruneError(f"{name} holds no plain matrix ({weight.dtype}); load the model without quantisation")
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    held: dict[str, torch.Tensor] = dict(module.named_parameters())
    if weight.is_meta:  # of a streamed model, and any numbers show what the module does with them
        held = {key: torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape) for key, p in held.items()}
    weight = held["weight"]
    x = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device).unsqueeze(0)
    more = LyapunovPruneError(f"{name} ({type(module).__name__}) does more than multiply by its weight")
    with torch.no_grad():
        try:
            output = torch.func.functional_call(module, held, (x,))
        except RuntimeError:  # DeepSeek V4's takes its input in groups
            raise more from None
        if isinstance(output, tuple):
            return False
        if not torch.allclose(output, nn.functional.linear(x, weight, held.get("bias")), rtol=1e-2, atol=1e-4):
            raise more
    return True


def groups(projections: tuple[Projection, ...]) -> dict[tuple[str, int], tuple[str, ...]]:
    """Matrices by (component, layer): the paper's compression groups."""
    members: dict[tuple[str, int], list[str]] = {}
    for p in projections:
        members.setdefault((p.component, p.layer), []).append(p.name)
    return {key: tuple(names) for key, names in members.items()}
