"""The studies of a sensitivity map by name: what each changes, where the papers do. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from lyapunov_prune.compression.table import METHODS

STUDY_METHODS = {name: m for name, m in METHODS.items() if m.unit in ("sparsity", "rank")}


class Study(NamedTuple):
    """What a study changes, one thing after another, in a line, and its reference.

    `after_groups`: which changes those are depends on what the study `group` showed. `in_all`: not so dear that it must
    be asked for by its name. `takes`: which settings it goes by; the others it makes itself, or has no use for.
    """

    help: str
    reference: str
    after_groups: bool = False
    in_all: bool = True
    takes: tuple[str, ...] = ("method", "sparsity", "rank")


STUDIES: dict[str, Study] = {
    "matrix": Study("each matrix", "structural sensitivity, §6.1"),
    "group": Study("each component of each layer", "structural sensitivity, §6.1, Figure 2"),
    "layer": Study("each layer", "structural sensitivity, §6.1"),
    "component": Study("each component in all layers", "structural sensitivity, §6.1"),
    "forward": Study("layers 0 to k, for each k", "structural sensitivity, §6.1, Figure 4"),
    "backward": Study("layers k to the last, for each k", "structural sensitivity, §6.1, Figure 4"),
    "sparsity": Study("all layers, at rising sparsities", "structural sensitivity, §5", takes=("method",)),
    "rank": Study("all layers, at rising ranks", "structural sensitivity, §5", takes=("method",)),
    "layer0": Study("layer 0, at rising sparsities", "structural sensitivity, §5", takes=("method", "rank")),
    "cliff": Study(
        "the most sensitive component of each layer, at five sparsities", "structural sensitivity, §6.1, Figure 3", True
    ),
    "greedy": Study(
        "the k groups of least regret together, for each k", "structural sensitivity, §6.4, Figure 7", True
    ),
    "greedy-rescored": Study(
        "the same, the groups left scored again after each (dear; not in all)",
        "structural sensitivity, §6.4, Figure 7",
        True,
        in_all=False,
    ),
    "threshold": Study(
        "layer 0 by Wanda, at rising sparsities: where is s*",
        "structural sensitivity, §6.3, Table 2",
        takes=("limit",),
    ),
    "removal": Study("each layer removed", "structural sensitivity, §6.5", takes=()),
}
