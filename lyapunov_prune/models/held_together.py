"""Families whose layers depend on each other: they read what another layer computed, or share blocks and parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from lyapunov_prune.models.adaptations import Cut


def shared_keys(cut: Cut) -> str | None:
    """The last `num_kv_shared_layers` layers reuse keys and values of the last layer of their kind before them.

    The gate's reference skips a layer's contribution to the residual stream, but not the keys that others read from it.
    So a layer cannot stay when its source leaves.
    """
    modes = cut.before.kv_sharing_modes
    kinds = cut.before.layer_types
    readers = {kinds[i]: i for i in cut.kept if modes[i] == "reuse"}
    for source, mode in enumerate(modes):
        if mode == "store" and source not in cut.kept and kinds[source] in readers:
            return _held(readers[kinds[source]], "reads the keys and values of", source)
    for new, layer in enumerate(cut.layers):
        attention: Any = layer.self_attn
        attention.store_full_length_kv = cut.config.kv_sharing_modes[new] == "store"
    return None


def _held(layer: int, reads: str, source: int) -> str:
    return f"layer {layer} {reads} layer {source}; keep layer {source}, or remove every layer that reads it"


def shared_index(cut: Cut) -> str | None:
    """A layer with a shared indexer attends to the tokens chosen by the last full indexer before it."""
    kinds = cut.before.indexer_types
    for i in cut.kept:
        source = max((j for j in range(i + 1) if kinds[j] == "full"), default=i)
        if source not in cut.kept:
            return _held(i, "attends to the tokens chosen by", source)
    return None


def gemma4(cut: Cut) -> str | None:
    if cut.config.layer_types[-1] != "full_attention":
        return (
            f"the last layer of this family always has full attention on loading, and layer {cut.kept[-1]} has "
            f"{cut.config.layer_types[-1]}; keep a layer with full attention as the last one"
        )
    why = shared_keys(cut)
    for module in cut.model.modules():
        if hasattr(module, "first_kv_shared_layer_idx"):
            module.first_kv_shared_layer_idx = len(cut.kept) - cut.config.num_kv_shared_layers
    return why


def zaya(cut: Cut) -> None:
    """A router adds the scaled state of the router before it; the first layer has no such scale."""
    router: Any = cut.layers[0].get_submodule("mlp.gate")
    if router.use_eda:
        router.use_eda = False
        del router.router_states_scale


def zaya_leaves(layers: nn.ModuleList, config: Any, removed: tuple[int, ...]) -> list[nn.Parameter]:
    """The router scale of the layer that becomes the first."""
    router: Any = layers[min(set(range(len(layers))) - set(removed))].get_submodule("mlp.gate")
    return [router.router_states_scale] if router.use_eda else []


def zamba(cut: Cut) -> str | None:
    """Loading ties the shared block of the first hybrid layer to the others, and fails if there are no others."""
    alone = cut.config.layers_block_type.count("hybrid") == 1
    return "one hybrid layer is left, which this family cannot load; keep two of them, or none" if alone else None


def _adapters(layer: nn.Module) -> list[tuple[nn.Module, str, nn.ModuleList]]:
    """Zamba 2: the lists of adapters in a shared block, one adapter per hybrid layer of the model."""
    shared = getattr(layer, "shared_transformer", nn.Identity())
    return [
        (module, name, child)
        for module in shared.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList)
    ]


def zamba2(cut: Cut) -> str | None:
    """Hybrid layers use the `num_mem_blocks` shared blocks in turn; adapters are indexed by hybrid layer."""
    left = [j for j, old in enumerate(cut.before.hybrid_layer_ids) if old in cut.kept]
    blocks = [j % cut.before.num_mem_blocks for j in left]
    turn = list(dict.fromkeys(blocks))
    if any(block != turn[j % len(turn)] for j, block in enumerate(blocks)):
        return (
            f"hybrid layers take {cut.before.num_mem_blocks} shared blocks in turn, and the remaining ones would take "
            f"{', '.join(map(str, blocks))}; remove hybrid layers so that the turn is kept"
        )
    cut.config.num_mem_blocks = len(turn) or 1
    for layer in cut.layers:
        for module, name, adapters in _adapters(layer):
            setattr(module, name, nn.ModuleList(adapters[j] for j in left))
        for module in getattr(layer, "shared_transformer", nn.Identity()).modules():
            holder: Any = module
            if hasattr(holder, "block_id"):
                holder.block_id = turn.index(holder.block_id)
            if hasattr(holder, "layer_dic"):
                holder.layer_dic = {new: j for j, new in enumerate(cut.config.hybrid_layer_ids)}
                holder.num_fwd_mem_blocks = len(left)
    return None


def zamba2_leaves(layers: nn.ModuleList, config: Any, removed: tuple[int, ...]) -> list[nn.Parameter]:
    """The adapters of removed hybrid layers, which lie in shared blocks that other layers still use."""
    gone = [j for j, old in enumerate(config.hybrid_layer_ids) if old in removed]
    return [p for layer in layers for _, _, lists in _adapters(layer) for j in gone for p in lists[j].parameters()]
