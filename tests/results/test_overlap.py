"""Runs that two texts share are found wherever they stand, and nothing else is."""

from __future__ import annotations

import time

import numpy as np
import pytest

from lyapunov_prune.results.overlap import fingerprint, run_hashes, shared_tokens

SIZE = 64
RANDOM = np.random.default_rng(0)
TEXT, OTHER = RANDOM.integers(50_000, size=(2, 5000))


def test_runs_have_one_hash_each_wherever_they_stand() -> None:
    rows = np.stack([TEXT, np.roll(TEXT, 7)])
    found = run_hashes(rows, SIZE)
    assert found.shape == (2, 5000 - SIZE + 1)
    assert np.array_equal(found[0, :-7], found[1, 7:])
    assert len(np.unique(found[0])) == found.shape[1]
    repeated = np.tile(TEXT[:50], 3)
    assert np.array_equal(run_hashes(repeated, 20)[:80], run_hashes(repeated, 20)[50:130])


@pytest.mark.parametrize("size", [1, 2, 13, 5000])
def test_runs_of_any_size(size: int) -> None:
    same = np.isin(run_hashes(TEXT[1:], size - 1 or 1), run_hashes(TEXT, size - 1 or 1))
    assert same.all()
    assert len(run_hashes(TEXT, size)) == 5000 - size + 1


def test_a_changed_or_moved_token_changes_the_hash() -> None:
    run = np.arange(SIZE)
    others = [np.where(run == i, 99, run) for i in range(SIZE)] + [np.roll(run, i) for i in range(1, SIZE)]
    assert len({int(run_hashes(x, SIZE)[0]) for x in [run, *others]}) == 2 * SIZE


@pytest.mark.parametrize("shift", [0, 1, 7, 8, 63, 1000])
def test_a_shift_hides_nothing(shift: int) -> None:
    text = np.concatenate([OTHER[:shift], TEXT])[:5000]
    assert shared_tokens(text, fingerprint(TEXT, SIZE)) == pytest.approx(5000 - shift, abs=8)


@pytest.mark.parametrize("place", [0, 3, 1234, 5000 - 71])
def test_a_run_as_long_as_size_and_stride_is_always_found(place: int) -> None:
    text = OTHER.copy()
    text[2000:2071] = TEXT[place : place + 71]
    assert 64 <= shared_tokens(text, fingerprint(TEXT, SIZE)) <= 71


def test_shorter_runs_and_other_texts_share_nothing() -> None:
    text = OTHER.copy()
    for start in range(0, 4900, 100):
        text[start : start + 63] = TEXT[start : start + 63]
    assert shared_tokens(text, fingerprint(TEXT, SIZE)) == 0


def test_a_text_shorter_than_a_run_is_known_whole() -> None:
    seen = fingerprint(TEXT[:40], SIZE)
    assert seen.size == 40
    assert shared_tokens(TEXT[:40], seen) == 40
    assert shared_tokens(TEXT[:39], seen) == 0


def test_a_long_text_takes_little_room_and_time() -> None:
    text = np.random.default_rng(1).integers(50_000, size=1_000_000)
    start = time.perf_counter()
    seen = fingerprint(text, SIZE)
    assert shared_tokens(text[100_001:104_097], seen) == pytest.approx(4096, abs=seen.stride)
    assert time.perf_counter() - start < 5  # 0.1 s on two cores that are free
    assert len(seen.hashes) < 45_000
    assert len(fingerprint(text[:4096], SIZE).hashes) < 6_000
