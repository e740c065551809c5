"""What is known of engines, held against checkpoints that do not follow a pattern any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import make_small, make_tiny, write_gguf
from transformers import AutoConfig

from lyapunov_prune.models.engines import ALL, SHORT_CUTS, EngineCheck, check_engines

SLIDING, FULL, LINEAR, CHUNKED = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"


def checked(folder: Path, family: str, layers: int = 8, **settings: Any) -> EngineCheck:
    folder.mkdir(exist_ok=True)
    AutoConfig.for_model(family, num_hidden_layers=layers, **settings).save_pretrained(folder)
    return check_engines(str(folder))


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
    found = [f for f in checked(tmp_path / "x", family, count, **settings).findings if thread in f.thread]
    told = [f.where for f in found if f.engine == engine]
    assert any(where in each or where.replace("layers", "layer") in each for each in told), told


# Each family of a row, as it is released, trips over nothing but what its engine does not know at all.
@pytest.mark.parametrize("family", sorted({family for row in SHORT_CUTS for family in row.families} - {ALL}))
def test_a_model_with_its_pattern_is_clean(family: str, tmp_path: Path) -> None:
    name = {"llama4": "llama4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}.get(
        family, {"gemma3": "gemma3_text"}.get(family, family)
    )
    layers = 12
    found = checked(tmp_path / "x", name, layers)
    assert found.passed, found.findings
    assert "violates none" in found.headline()
    assert len(found.to_frame()) == 0


def test_every_row_is_tripped_by_a_checkpoint_of_these_tests() -> None:
    tripped = {(engine, thread) for engine, _, thread, _, _ in TRIPPED}
    others = [row for row in SHORT_CUTS if not any(row.engine == e and t in row.thread for e, t in tripped)]
    assert [row.families for row in others] == [(ALL,), (ALL,)]


def test_whole_periods_that_are_removed_trip_nothing(tmp_path: Path) -> None:
    assert checked(tmp_path / "x", "qwen3_next", 8, layer_types=HYBRID[:8]).passed
    found = checked(tmp_path / "y", "qwen3_next", 11, layer_types=without(HYBRID, 0))
    assert all("whole periods" in f.helps for f in found.findings)
    assert "whole periods" in "\n".join(found.answer())


def test_arrays_of_a_gguf_file_that_stayed_long(tmp_path: Path) -> None:
    model = make_tiny("llama", vocab_size=260)
    clean = write_gguf(model, tmp_path / "a.gguf", values={"attention.head_count_kv": [2] * 6})
    assert check_engines(str(clean)).passed
    pruned = write_gguf(model, tmp_path / "b.gguf", values={"attention.sliding_window_pattern": [1] * 7})
    (finding,) = check_engines(str(pruned)).findings
    assert (finding.engine, finding.where) == ("llama.cpp", "llama.attention.sliding_window_pattern")
    assert "#27976" in finding.thread


def test_a_compact_checkpoint_is_served_by_none(tmp_path: Path) -> None:
    make_small("llama").save_pretrained(tmp_path)
    (finding,) = check_engines(str(tmp_path)).findings
    assert "do not serve" in finding.does


# The command.


def test_findings_are_exit_code_1_and_a_clean_checkpoint_0(run: Callable[..., Any], checkpoint: Path) -> None:
    done = run("check", "tiny", "--engines")
    assert (done.code, done.err, done.changed) == (0, "", set())
    assert "violates none" in done.out
    AutoConfig.for_model("gpt_oss", num_hidden_layers=3, layer_types=[FULL, SLIDING, FULL]).save_pretrained("odd")
    done = run("check", "odd", "--engines")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "vllm-project/vllm#33594" in done.out
    assert "vLLM" in done.out
    assert "llama.cpp" in done.out


@pytest.mark.parametrize("more", [["--tokens", "8"], ["-o", "run"], ["tiny"]])
def test_what_is_of_bounds_is_refused(more: list[str], run_bad: Callable[..., str]) -> None:
    assert "--engines reads the config alone" in run_bad("check", "tiny", *more, "--engines")
