"""Roles of matrices from their names, on models of every listed family."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers import LAYERS, make_tiny

from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.roles import NAMES, ROLES, role


def test_every_family_has_every_role_in_every_layer(family: str) -> None:
    found = Counter(role(p.component) for p in find_projections(wrap(make_tiny(family))) if p.head in (None, 0))
    gated = family in {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"}
    wanted = dict.fromkeys(("query", "key", "value", "attention-output", "mlp-out"), LAYERS)
    assert found == {**wanted, "mlp-in": LAYERS * (2 if gated else 1)}


@pytest.mark.parametrize(
    ("component", "wanted"),
    [
        ("attn.c_proj", "attention-output"),  # GPT-2 calls both outputs c_proj
        ("mlp.c_proj", "mlp-out"),
        ("attention.output.dense", "attention-output"),  # and BERT dense
        ("output.dense", "mlp-out"),
        ("attn.c_attn.k", "key"),
        ("attn.c_attn", "other"),
        ("mlp.experts.gate_up_proj", "mlp-in"),
        ("mlp.shared_experts.down_proj", "mlp-out"),
        ("self_attn.gate_proj", "other"),
        ("mlp.gate.down_proj", "other"),
        ("linear_attn.k_proj", "other"),
        ("mamba.out_proj", "other"),
        ("mixer.in_proj", "other"),
        ("self_attn.kv_b_proj", "other"),
        ("self_attn.indexer.wk", "other"),
        ("xk_proj", "other"),  # names, not substrings
        ("", "other"),
    ],
)
def test_the_longest_end_of_a_path_decides(component: str, wanted: str) -> None:
    assert role(component) == wanted


def test_no_name_has_two_roles() -> None:
    assert sum(map(len, NAMES.values())) == len(ROLES)
