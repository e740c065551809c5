"""Blocks that llama.cpp's own code writes: the gguf package agrees where it can, and every type reads back."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from lyapunov_prune.budget.blocks import KINDS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.models.ggml import WIDE, Kind, bits_of, dequantised, fits, quantised

pytestmark = pytest.mark.skipif(not installed(), reason="xllamacpp is not installed")
W = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)


def error(kind: Kind, importance: np.ndarray | None = None) -> np.ndarray:
    """The mean squared error of every column."""
    return ((dequantised(quantised(W, kind, importance), kind) - W) ** 2).mean(0)


@pytest.mark.parametrize("name", ["Q8_0", "Q5_0", "Q4_0", "Q5_1", "Q4_1", "BF16", "F16"])
def test_the_gguf_package_writes_the_same_bytes(name: str) -> None:
    theirs = gguf.quants.quantize(W, Kind[name]).view(np.uint8)
    if name in ("Q5_1", "Q4_1"):  # llama.cpp searches for the scale, and so is nearer
        assert error(Kind[name]).sum() <= ((dequantised(theirs, Kind[name]) - W) ** 2).mean(0).sum()
    else:
        assert np.array_equal(quantised(W, Kind[name]), theirs)


def test_every_type_takes_its_bytes_and_more_bits_lose_less() -> None:
    kinds = [kind for kind in KINDS if kind.name not in ("IQ2_S", "IQ2_XS")]  # their tables take seconds to make
    for kind in kinds:
        assert quantised(W, kind).nbytes * 8 == bits_of(kind) * W.size
        assert error(kind).mean() < 3.0 * 4.0 ** (1 - min(bits_of(kind), 9.0))  # BF16 has 8 bits of mantissa


def test_important_columns_are_nearer() -> None:
    importance = np.where(np.arange(512) % 32 < 4, 1000.0, 1.0)
    gain = error(Kind.Q4_K) / error(Kind.Q4_K, importance)
    assert gain[importance > 1].mean() > 1.5


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    assert not fits(Kind.Q4_K, 576)
    assert fits(Kind.Q4_0, 576)
    assert all(fits(kind, 7) for kind in WIDE)
    assert not fits(Kind.Q8_K, 512)  # a type of activations
    with pytest.raises(LyapunovPruneError):
        quantised(W[:, :500], Kind.Q4_0)
