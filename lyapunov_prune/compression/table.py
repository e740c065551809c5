"""The methods by name: what each does, where it comes from, what it must know. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class Method(NamedTuple):
    """What a method does in a line, its reference, what it must know, and what its amount is.

    `needs`: "nothing", "norms", "gram" or "sensitivity" (with "gram"), the fields of Statistics. `amount`: "sparsity",
    "rank" or "bits".
    """

    help: str
    reference: str
    needs: str
    amount: str


METHODS: dict[str, Method] = {
    "magnitude": Method(
        "the smallest entries become zero", "Han et al., NeurIPS 2015, arXiv:1506.02626", "nothing", "sparsity"
    ),
    "weight-only": Method(
        "of each row the least |W_ij| ‖W_:j‖ become zero",
        "structural sensitivity, §6.1: its simplified Wanda",
        "nothing",
        "sparsity",
    ),
    "wanda": Method(
        "of each row the least |W_ij| ‖x_j‖ become zero",
        "Sun et al., ICLR 2024, arXiv:2306.11695, eq. 1",
        "norms",
        "sparsity",
    ),
    "sparsegpt": Method(
        "entries become zero, the inputs to come make up for them",
        "Frantar and Alistarh, ICML 2023, arXiv:2301.00774, Algorithm 1",
        "gram",
        "sparsity",
    ),
    "svd": Method("the nearest matrix of lower rank", "Eckart and Young, Psychometrika 1, 1936", "nothing", "rank"),
    "whitened-svd": Method(
        "the matrix of lower rank whose outputs are nearest",
        "Wang et al., ICLR 2025, arXiv:2403.07378, §3.1",
        "gram",
        "rank",
    ),
    "balanced": Method(
        "the nearest of lower rank, outputs weighted by how they move the layer",
        "Moore, IEEE TAC 26, 1981, with Gramians that are measured",
        "sensitivity",
        "rank",
    ),
    "rtn": Method(
        "round to the nearest of 2^bits even steps", "Nagel et al., 2021, arXiv:2106.08295, §2.2.1", "nothing", "bits"
    ),
}
