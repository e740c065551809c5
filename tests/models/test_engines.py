"""What is known of engines, held against checkpoints that do not follow a pattern any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import edit_json, make_small
from transformers import AutoConfig

from lyapunov_prune.models.engines import ALL, SHORT_CUTS, ShortCut, short_cuts_of

SLIDING, FULL, LINEAR, CHUNKED = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"


def checked(folder: Path, family: str, layers: int = 8, **settings: Any) -> list[tuple[ShortCut, str]]:
    folder.mkdir(exist_ok=True)
    AutoConfig.for_model(family, num_hidden_layers=layers, **settings).save_pretrained(folder)
    return short_cuts_of(str(folder))


def without(kinds: list[Any], *gone: int) -> list[Any]:
    return [kind for i, kind in enumerate(kinds) if i not in gone]


HYBRID = [LINEAR, LINEAR, LINEAR, FULL] * 3
# A checkpoint that trips over a row, by engine, family and part of the thread, and what it is told.
TRIPPED: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("vLLM", "gpt_oss", "#33594", {"layer_types": without([SLIDING, FULL] * 4, 1)}, "layers 1, 2, 3, 4, 5, 6"),
    ("vLLM", "qwen3", "#39514", {"use_sliding_window": True, "max_window_layers": 6}, "layers 6, 7"),
    ("SGLang", "qwen2", "#22528", {"use_sliding_window": True, "max_window_layers": 7}, "layer 7"),
    ("SGLang", "llama4_text", "llama4.py", {"no_rope_layers": without([1, 1, 1, 0] * 3, 1, 2)}, "layers 1, 3, 5"),
    ("llama.cpp", "qwen3_5_text", "#28207", {"layer_types": without(HYBRID, 0)}, "layers 2, 3, 6, 7"),
    ("llama.cpp", "qwen3", "#26286", {"use_sliding_window": True, "max_window_layers": 7}, "layer 7"),
    ("llama.cpp", "gemma2", "gemma2.cpp", {"layer_types": without([SLIDING, FULL] * 4, 0)}, "layers 0, 1, 2, 3"),
    ("llama.cpp", "gpt_oss", "gemma2.cpp", {"layer_types": without([SLIDING, FULL] * 4, 5)}, "layers 5, 6"),
    ("llama.cpp", "gemma3_text", "gemma3.cpp", {"layer_types": without([SLIDING] * 5 + [FULL] * 2, 0)}, "layer 4"),
    ("llama.cpp", "smollm3", "#14581", {"no_rope_layers": without([1, 1, 1, 0] * 2, 0)}, "layers 2, 3, 6"),
    ("llama.cpp", "llama4_text", "llama4.cpp", {"interleave_moe_layer_step": 2, "moe_layers": [0, 3]}, "layers 0, 1"),
    ("llama.cpp", "qwen3_moe", "qwen3moe.cpp", {"mlp_only_layers": [2, 5]}, "layers 2, 5"),
    ("llama.cpp", "gemma2", "gemma2.cpp", {"query_pre_attn_scalar": 144}, "scale of 1/√256 in place of 1/√144"),
    ("Megatron-Bridge", "qwen3_next", "#4843", {"layer_types": without(HYBRID, 0)}, "layers 2, 3, 6, 7"),
    ("llm-compressor's AWQ", "qwen3_next", "#2260", {"layer_types": without(HYBRID, 8)}, "layers 10"),
]


@pytest.mark.parametrize(("engine", "family", "thread", "settings", "where"), TRIPPED)
def test_a_short_cut_is_seen(
    engine: str, family: str, thread: str, settings: dict[str, Any], where: str, tmp_path: Path
) -> None:
    count = next((len(v) for k, v in settings.items() if k in ("layer_types", "no_rope_layers")), 8)
    found = checked(tmp_path / "x", family, count, **settings)
    told = [layers for row, layers in found if thread in row.thread and row.engine == engine]
    assert any(where in each or where.replace("layers", "layer") in each for each in told), told


# Each family of a row, as it is released, trips over nothing but what its engine does not know at all.
@pytest.mark.parametrize("family", sorted({family for row in SHORT_CUTS for family in row.families} - {ALL}))
def test_a_model_with_its_pattern_is_clean(family: str, tmp_path: Path) -> None:
    name = {"llama4": "llama4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}.get(
        family, {"gemma3": "gemma3_text"}.get(family, family)
    )
    layers = 12
    assert not checked(tmp_path / "x", name, layers)


def test_every_row_is_tripped_by_a_checkpoint_of_these_tests() -> None:
    tripped = {(engine, thread) for engine, _, thread, _, _ in TRIPPED}
    others = [row for row in SHORT_CUTS if not any(row.engine == e and t in row.thread for e, t in tripped)]
    assert [row.families for row in others] == [(ALL,)]


def test_whole_periods_that_are_removed_trip_nothing(tmp_path: Path) -> None:
    assert not checked(tmp_path / "x", "qwen3_next", 8, layer_types=HYBRID[:8])
    found = checked(tmp_path / "y", "qwen3_next", 11, layer_types=without(HYBRID, 0))
    assert found
    assert all(row.periodic for row, _ in found)


def test_a_compact_checkpoint_is_served_by_none(tmp_path: Path) -> None:
    make_small("llama").save_pretrained(tmp_path)
    ((row, _),) = short_cuts_of(str(tmp_path))
    assert "do not serve" in row.does


# The command.


def test_short_cuts_are_told_and_are_no_fault_of_the_file(run: Callable[..., Any], checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", layer_types=[FULL] * 5 + [SLIDING], sliding_window=8, model_type="qwen3")
    done = run("check", "tiny")
    assert "vllm-project/vllm#39514" in done.out
