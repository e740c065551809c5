"""Which layers of a GGUF file see a window, and what a header says when some of them are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.gguf_header import Header, Tensor, Value, array, number, text
from lyapunov_prune.models.gguf_layers import full_attention, values_without


def header(name: str, layers: int, **values: Value) -> Header:
    own = {"block_count": number(layers), **values}
    tensors = tuple(Tensor(f"blk.{i}.attn_q.weight", (1,), 0, Path("x"), 0, 4) for i in range(layers))
    named = {f"{name}.{key.replace('__', '.')}": value for key, value in own.items()}
    return Header(Path("x"), (Path("x"),), {"general.architecture": text(name)} | named, tensors, 32)


PATTERN = "attention__sliding_window_pattern"
KEY = "gemma3.attention.sliding_window_pattern"


def without(model: Header, *gone: int) -> dict[str, Value]:
    return values_without(model, tuple(i for i in range(model.layers) if i not in gone))


def test_the_period_of_the_family_holds_where_the_file_is_silent() -> None:
    assert full_attention(header("gemma3", 12)) == tuple(i in (5, 11) for i in range(12))
    assert full_attention(header("gemma3", 6, **{PATTERN: number(3)})) == tuple(i in (2, 5) for i in range(6))
    assert full_attention(header("gemma3", 3, **{PATTERN: array(7, [True, False, True])})) == (False, True, False)
    assert full_attention(header("llama", 4)) is None


@pytest.mark.parametrize(
    ("gone", "period"),
    [
        ((0, 6, 12), 5),  # one window of every six
        ((0, 1, 6, 7, 12, 13), 4),
        ((5, 11, 17), 0),  # windows alone
        (tuple(range(6)), None),  # a whole period: nothing has to be said
        ((12, 13, 14, 15, 16, 17), None),
    ],
)
def test_a_period_that_fits_is_found(gone: tuple[int, ...], period: int | None) -> None:
    values = without(header("gemma3", 18), *gone)
    assert values["gemma3.block_count"].read() == 18 - len(gone)
    assert (values[KEY].read() if KEY in values else None) == period


def test_a_pattern_that_lists_the_layers_is_filtered() -> None:
    values = without(header("gemma3", 4, **{PATTERN: array(7, [True, True, True, False])}), 1)
    assert values[KEY].read() == [True, True, False]


@pytest.mark.parametrize(
    ("model", "gone", "told"),
    [
        (header("gemma3", 18), (0,), "whole periods"),
        (header("gemma2", 46), (0, 1), "scales the attention"),
        (header("gemma2", 48), (0, 1), "scales the attention"),
        (header("newest", 6), (0,), "newest"),
        (header("llama", 6, some__counts=array(4, [1, 2, 3])), (0,), "3 values"),
        (header("llama", 6, full_attention_interval=number(4)), (0,), "full_attention_interval"),
    ],
)
def test_what_llama_cpp_would_read_wrong_is_refused(model: Header, gone: tuple[int, ...], told: str) -> None:
    with pytest.raises(LyapunovPruneError) as refused:
        without(model, *gone)
    assert told in str(refused.value)
