"""Families whose layers depend on each other: they read what another layer computed, or share blocks and parameters."""

from __future__ import annotations

import re

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
    return shared_keys(cut)


def zamba(cut: Cut) -> str | None:
    """Loading ties the shared block of the first hybrid layer to the others, and fails if there are no others."""
    alone = cut.config.layers_block_type.count("hybrid") == 1
    return "one hybrid layer is left, which this family cannot load; keep two of them, or none" if alone else None


def zamba2(cut: Cut) -> str | None:
    """Hybrid layers use the `num_mem_blocks` shared blocks in turn; adapters are indexed by hybrid layer."""
    blocks = [j % cut.before.num_mem_blocks for j in _hybrids_left(cut)]
    turn = list(dict.fromkeys(blocks))
    if any(block != turn[j % len(turn)] for j, block in enumerate(blocks)):
        return (
            f"hybrid layers take {cut.before.num_mem_blocks} shared blocks in turn, and the remaining ones would take "
            f"{', '.join(map(str, blocks))}; remove hybrid layers so that the turn is kept"
        )
    cut.config.num_mem_blocks = len(turn) or 1
    return None


def _hybrids_left(cut: Cut) -> list[int]:
    return [j for j, old in enumerate(cut.before.hybrid_layer_ids) if old in cut.kept]


def zamba2_names(cut: Cut, name: str) -> str | None:
    """Adapters of a shared block are numbered by hybrid layer."""
    found = re.match(r"(.*adapter_list\.)(\d+)(.*)", name)
    if found is None:
        return name
    left, old = _hybrids_left(cut), int(found[2])
    return f"{found[1]}{left.index(old)}{found[3]}" if old in left else None
