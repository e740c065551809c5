"""Without its entry in the family table each family fails: the entry is needed, and the gate sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from families.zoo import LAYERS, make_zoo
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, remove_layers, verify_removal
from lyapunov_prune.models import structure
from lyapunov_prune.models.families import FAMILIES, Family
from lyapunov_prune.models.structure import find_structure

# Model of the zoo, and layers that its entry removes correctly or refuses. GPT-Neo is not here: its entry
# corrects a second notation of the same fact, which transformers 5 writes but does not read, and neither is LongCat,
# whose entry counts the caches, of which more do no harm; what that of Granite 4 Vision does only an image shows
# (models/test_wrappers.py).
ENTRIES: dict[str, tuple[str, list[int]]] = {
    "beam": ("beam", [0]),
    "diffllama": ("diffllama", [3]),
    "ernie4_5_moe": ("ernie4_5_moe-interval", [2, 5]),
    "gemma3n_text": ("gemma3n_text", [2, 5]),
    "gemma4_text": ("gemma4_text", [2, 5]),
    "gemma4_unified_text": ("gemma4_unified_text", [2, 5]),
    "glm_moe_dsa": ("glm_moe_dsa", [2, 5]),
    "gpt2": ("gpt2-inverse-layer", [3]),
    "hy_v4": ("hy_v4", [2, 5]),
    "inkling2_text": ("inkling2_text", [3]),
    "jamba": ("jamba", [0]),
    "minicpm3": ("minicpm3", [3]),
    "minimax": ("minimax", [0]),
    "olmo_hybrid": ("olmo_hybrid", [0, 1, 3, 4, 5, 6, 7]),
    "qwen4_exp_text": ("qwen4_exp_text", [3]),
    "recurrent_gemma": ("recurrent_gemma", [2, 5]),
    "zamba": ("zamba", [0, 1, 3, 4, 5, 6, 7]),
    "zamba2": ("zamba2", [2]),
}


def test_every_entry_is_tried() -> None:
    elsewhere = {"gpt_neo", "granite4_vision_text", "longcat_flash"}
    of_removal = {name for name, row in FAMILIES.items() if replace(row, fused={}, transposed=False) != Family()}
    assert set(ENTRIES) | elsewhere == of_removal


@pytest.mark.slow
@pytest.mark.parametrize("model_type", list(ENTRIES))
def test_without_its_entry_the_gate_refuses(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, layers = ENTRIES[model_type]
    model = make_zoo(name)
    monkeypatch.delitem(FAMILIES, model_type)
    monkeypatch.setattr(structure, "TRUSTED", frozenset())  # the gate looks at every family
    with pytest.raises(LyapunovPruneError, match="cannot be removed correctly"):
        remove_layers(model, layers)


def wrong_index(pruned: PreTrainedModel) -> None:
    find_structure(pruned).layers[2].mixer.layer_idx = 3


def other_input_table(pruned: PreTrainedModel) -> None:
    table = pruned.get_submodule("model.embed_tokens_per_layer")
    assert isinstance(table, nn.Embedding)
    with torch.no_grad():
        table.weight.copy_(table.weight.roll(1, dims=1))


def window_of_another_layer(pruned: PreTrainedModel) -> None:
    pruned.config.layer_types = [*pruned.config.layer_types[1:], pruned.config.layer_types[0]]


def period_of_another_model(pruned: PreTrainedModel) -> None:
    pruned.config.attn_layer_offset = 0


@pytest.mark.parametrize(
    ("name", "fault", "check"),
    [
        ("mamba", wrong_index, "cached decoding"),
        ("mamba2", wrong_index, "cached decoding"),
        ("gemma3n_text", other_input_table, "same as skipping"),
        ("olmo3", window_of_another_layer, "same as skipping"),
        ("jamba", period_of_another_model, "reloads as saved"),
    ],
)
def test_a_planted_fault_fails(name: str, fault: Callable[[PreTrainedModel], None], check: str) -> None:
    model = make_zoo(name)
    pruned = remove_layers(model, [LAYERS - 1])
    fault(pruned)
    report = verify_removal(model, pruned, [LAYERS - 1])
    assert any(check in c.name for c in report.checks if not c.passed), f"\n{report}"
