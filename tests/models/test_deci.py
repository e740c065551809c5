"""A config says what layers lack as vLLM and llama.cpp's converter read it, or why they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_tiny

from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.models.compact import BLOCKS, as_served, not_deci
from lyapunov_prune.models.modeling_compact import CompactLlamaConfig


def config(name: str = "llama", gone: tuple[int, ...] = (1, 3), **changes: Any) -> dict[str, Any]:
    return make_compact(make_tiny(name, **changes), Cuts(attention=gone)).config.to_dict()


def width_read(ffn: Any, hidden: int) -> int:
    """The width of a feed-forward block as nemotron_nas.py of vLLM reads it."""
    if not hasattr(ffn, "ffn_mult"):
        return ffn.intermediate_size
    width = int(2 * ffn.ffn_mult * hidden / 3)
    return width if width % 256 == 0 else width + 256 - width % 256


@pytest.mark.parametrize(("width", "hidden"), [(1536, 576), (14336, 4096), (8960, 1536), (48, 32), (11008, 4096)])
def test_blocks_read_back_as_they_are(width: int, hidden: int) -> None:
    plain = config() | {"intermediate_size": width, "hidden_size": hidden}
    written = as_served(plain | {BLOCKS: []})
    assert written["architectures"] == ["DeciLMForCausalLM"]
    again = CompactLlamaConfig(**{key: written[key] for key in ("cuts", BLOCKS)})
    assert [block.attention.no_op for block in again.block_configs] == [i in (1, 3) for i in range(6)]
    assert [block.attention.n_heads_in_group for block in again.block_configs] == [2, None, 2, None, 2, 2]
    assert {width_read(block.ffn, hidden) for block in again.block_configs} == {width}
    assert all(hasattr(block.ffn, "ffn_mult") == (width % 256 == 0) for block in again.block_configs)
    assert again.to_dict()[BLOCKS] == written[BLOCKS]


def test_a_config_without_blocks_stays_as_it_is() -> None:
    assert as_served(config()) == config()
    assert as_served({"model_type": "gpt2"}) == {"model_type": "gpt2"}


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (config("qwen2"), "it is a qwen2"),
        (config(gone=(0, 3)), "layer 0 lacks its attention"),
        (config(hidden_act="gelu"), "its activation is gelu"),
        (config("mistral"), "sliding window"),
        (config() | {"cuts": [{} for _ in range(6)]}, "every layer has its attention"),
        (make_compact(make_tiny("llama"), Cuts((1,), {2: (torch.eye(32), None)})).config.to_dict(), "merged blocks"),
        (config("mistral", sliding_window=None), ""),
    ],
)
def test_what_engines_cannot_run_is_told_and_not_written(told: dict[str, Any], why: str) -> None:
    assert why in (not_deci(told) or "")
    assert bool(why) == bool(not_deci(told))
    assert (BLOCKS in as_served(told | {BLOCKS: []})) == (not why)
