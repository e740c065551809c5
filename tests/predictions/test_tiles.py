"""Measures summed over tiles of the vocabulary, against the definitions on whole rows in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import measures_by_definition
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.predictions import tiles as module
from lyapunov_prune.predictions.tiles import measures

LOGITS = arrays(np.float64, (2, 7), elements=st.floats(-8, 8))


class Heads:
    """A scorer whose states are the logits themselves."""

    def __init__(self, vocabulary: int, *, blockwise: bool = True) -> None:
        self.vocabulary, self.blockwise = vocabulary, blockwise
        self.formed: list[int] = []

    def tiles(self, state: torch.Tensor, columns: int) -> Iterator[torch.Tensor]:
        self.formed.append(len(state) * (columns if self.blockwise else self.vocabulary))
        return iter(state.split(columns, -1))

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return state


def of(z: np.ndarray, *changed: np.ndarray, T: float = 1.0, columns: int = 3, rows: int = 64) -> np.ndarray:
    """Changes × 5 × positions."""
    scorer: Any = Heads(z.shape[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_COLUMNS", columns)
        patch.setattr(module, "_ROWS", rows)
        return measures(scorer, torch.tensor(z), [torch.tensor(x) for x in changed], T).numpy()


@settings(max_examples=200)
@given(LOGITS, LOGITS, LOGITS, st.floats(0.25, 4), st.integers(1, 8))
def test_measures_are_the_definitions_whatever_the_tiles(
    z: np.ndarray, a: np.ndarray, b: np.ndarray, T: float, columns: int
) -> None:
    found = of(z, z + a, z + b, T=T, columns=columns)
    for number, d in enumerate((a, b)):
        np.testing.assert_allclose(found[number], measures_by_definition(z, z + d, T), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("columns", [256, 300, 4096])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_runs_of_columns_and_steps_of_changes_are_the_definitions(columns: int, rows: int) -> None:
    """Tiles of whole runs and of others, and a last one that is narrower."""
    rng = np.random.default_rng(columns + rows)
    z = 4 * rng.normal(size=(5, 1025))
    changed = [z + scale * rng.normal(size=z.shape) for scale in (0.01, 1, 8)]
    found = of(z, *changed, T=1.5, columns=columns, rows=rows)
    for one, other in zip(found, changed, strict=True):
        np.testing.assert_allclose(one, measures_by_definition(z, other, 1.5), rtol=1e-10)


@settings(max_examples=100)
@given(LOGITS, LOGITS, st.floats(-50, 50))
def test_a_shift_of_all_logits_changes_nothing(z: np.ndarray, dz: np.ndarray, shift: float) -> None:
    found = np.delete(of(z, z + dz, z + dz + shift), 3, axis=1)  # a shift may round two logits to a tie
    np.testing.assert_allclose(found[1], found[0], rtol=1e-7, atol=1e-12)


def test_what_does_not_move_is_zero_and_no_rounding() -> None:
    z = 4 * np.random.default_rng(0).normal(size=(4, 300))
    assert (of(z, z, columns=128) == 0).all()


@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_tiny_changes_keep_their_digits(scale: float, shift: float) -> None:
    """Against the first three cumulants of Δz under p; logits that all rise hide nothing."""
    rng = np.random.default_rng(0)
    z, dz = 4 * rng.normal(size=(1, 300)), scale * rng.normal(size=(1, 300))
    p = softmax(z, axis=-1)
    moved = (z + dz + shift) - z  # as float64 has it
    d = moved - (p * moved).sum(-1, keepdims=True)
    half, sixth = (p * d**2).sum(-1) / 2, (p * d**3).sum(-1) / 6
    ((variance,), (kl,), (reverse,), *_) = of(z, z + dz + shift, columns=128)[0]
    rtol = scale**2 + 1e-9 / scale * 1e-6
    np.testing.assert_allclose(variance, half, rtol=1e-9)
    np.testing.assert_allclose(kl, half + sixth, rtol=rtol)
    np.testing.assert_allclose(reverse, half + 2 * sixth, rtol=rtol)


def test_a_likeliest_token_that_nothing_can_outweigh_hides_no_change_of_the_others() -> None:
    """Divergences of 1e-15, against the definitions in 80 bits: float64 has no digits of `log q/p` there."""
    z = np.zeros(300, dtype=np.longdouble)
    z[7] = 40
    d = np.random.default_rng(1).normal(size=z.shape).astype(np.longdouble)
    d[7] = 3
    p, q = (np.exp(x) / np.exp(x).sum() for x in (z, z + d))
    kl, reverse = (p * (np.log(p) - np.log(q))).sum(), (q * (np.log(q) - np.log(p))).sum()
    found = of(np.float64(z[None]), np.float64((z + d)[None]), columns=128)[0, :, 0]
    np.testing.assert_allclose(found[1:3], np.float64([kl, reverse]), rtol=1e-3)
    np.testing.assert_allclose(found[0], np.float64((p * (d - (p * d).sum()) ** 2).sum() / 2), rtol=1e-9)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_what_an_exponential_cannot_hold_is_taken_from_whole_rows(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = np.array([[1.0, 2.0, 0.0], [0.0, 2000.0, -3000.0]])
    scorer = Heads(3)
    found = of(z, -z, z + 0.5, columns=columns)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[0, 1:4, 1], [4000 - 0.0 + 1000, 3000.0 + 2000, 1], rtol=1e-12)
    np.testing.assert_allclose(found[0, :, 0], measures_by_definition(z[:1], -z[:1])[:, 0], rtol=1e-12)
    assert np.abs(found[1]).max() < 1e-12
    # Planted fault: without them there is no number.
    monkeypatch.setattr(
        module, "_by_rows", lambda readers, states, T, wanted: torch.full((5, len(states[0])), torch.nan)
    )
    assert np.isnan(of(z, -z, columns=columns)).any()
    assert scorer.formed == []


class Doubled(Heads):
    """A scorer whose logits are twice its states."""

    def tiles(self, state: torch.Tensor, columns: int) -> Iterator[torch.Tensor]:
        return super().tiles(2 * state, columns)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return 2 * state


@pytest.mark.parametrize("columns", [2, 3, 8])
@pytest.mark.parametrize("T", [1.0, 0.7])
def test_losses_and_several_scorers_are_the_definitions(
    columns: int, T: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COLUMNS", columns)
    z, a, b, c = (torch.tensor(x) for x in np.random.default_rng(0).normal(size=(4, 6, 7)))
    a[2] *= 3000  # more than exp can hold
    one: Any = Heads(7)
    two: Any = Doubled(7)
    wanted = torch.tensor([0, 6, 3, 2, 1, 5])
    found = measures(one, z, [a, b, c], T, read_by=[two, one, two], wanted=wanted).numpy()
    assert found.shape == (3, 6, 6)
    for number, logits in enumerate((2 * a, b, 2 * c)):
        losses = -(logits / T).log_softmax(-1)[torch.arange(6), wanted]
        np.testing.assert_allclose(found[number, 5], losses, rtol=1e-12)
        alone = of(z.numpy(), logits.numpy(), T=T, columns=columns)[0]
        np.testing.assert_allclose(found[number, :5], alone, rtol=1e-12)


def test_of_two_likeliest_tokens_the_first_counts() -> None:
    """As in greedy decoding; in half precision ties are common."""
    z = np.zeros((6, 512))
    z[:, 300] = 2.0
    z2 = z.copy()
    z2[0, 40] = z2[1, 290] = z2[2, 500] = z2[3, 301] = 2.0  # a tie before it, or behind it
    z2[4, 500], z2[5, 40] = 3.0, 3.0
    for columns in (128, 256, 512, 100):
        assert of(z, z2, columns=columns)[0, 3].tolist() == [1, 1, 0, 0, 1, 1], columns


def test_no_more_is_formed_than_said_in_blocks_that_are_as_large_as_each_other() -> None:
    z = torch.randn(50, 97, generator=torch.Generator().manual_seed(0))
    changed = [z + 1] * 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ENTRIES", 6 * 97 * 4)
        patch.setattr(module, "_COLUMNS", 10)
        for blockwise, rows in ((True, [25, 25]), (False, [4] * 11 + [3] * 2)):  # of 38 and of 4 that may be
            scorer: Any = Heads(97, blockwise=blockwise)
            measures(scorer, z, changed, 1.0)
            assert scorer.formed == [6 * number * (10 if blockwise else 97) for number in rows]


def test_numbers_that_are_none_are_told_or_stay() -> None:
    z = np.ones((3, 5))
    broken = z.copy()
    broken[1, 2] = np.inf
    found = of(z, broken, z * np.nan)
    assert np.isfinite(found[0][:, [0, 2]]).all()
    assert not np.isfinite(found[0][:, 1]).all()
    assert np.isnan(found[1][1]).all()
    with pytest.raises(LyapunovPruneError, match=r"NaN .*dense model"):
        of(broken, z)
