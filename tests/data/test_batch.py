"""Windows of token ids: what they say of themselves, and what is refused of them at the very edge."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from helpers import as_batch, make_tiny
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding, PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.data.batch import LEAK_TOKENS, TokenBatch, require_disjoint
from lyapunov_prune.errors import LyapunovPruneError

IDS = torch.arange(12).view(3, 4)


def batch(ids: torch.Tensor, bos: bool | None = False) -> TokenBatch:
    return TokenBatch(ids, "a text", "all", bos)


def test_it_knows_its_windows() -> None:
    found = batch(IDS)
    assert (len(found), found.context, found.tokens) == (3, 4, 12)
    assert found.item(1).tolist() == [4, 5, 6, 7]
    assert found.take([2, 0]).ids.tolist() == [IDS[2].tolist(), IDS[0].tolist()]
    assert [part.tolist() for part in found.windows(2)] == [IDS[:2].tolist(), IDS[2:].tolist()]
    assert found.text_hash == hashlib.sha256(b"(3, 4)" + np.arange(12).astype("<i8").tobytes()).hexdigest()
    assert found.text_hash == batch(IDS.int()).text_hash != batch(IDS.view(2, 6)).text_hash


def test_the_stream_leaves_out_what_every_window_begins_with() -> None:
    begun = torch.cat([torch.ones(3, 1, dtype=torch.int64), IDS], dim=1)
    inside = np.arange(12).tolist()
    assert batch(begun, True).stream.tolist() == batch(begun, None).stream.tolist() == inside
    assert batch(begun, False).stream.tolist() == begun.flatten().tolist()
    assert batch(IDS, None).stream.tolist() == inside  # the windows begin with different tokens
    assert batch(begun[:1], None).stream.tolist() == [1, 0, 1, 2, 3]  # of one window nothing is known
    assert batch(IDS, True).stream.tolist() == IDS[:, 1:].flatten().tolist()


@pytest.mark.parametrize("shape", [(4,), (1, 2, 3), (0, 4), (2, 1), (2, 0)])
def test_a_shape_that_is_no_batch_is_refused(shape: tuple[int, ...], llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match="two tokens or more"):
        as_batch(llama, torch.zeros(shape, dtype=torch.int64))


def test_the_smallest_batch_and_the_last_id_are_taken(llama: PreTrainedModel) -> None:
    assert as_batch(llama, torch.tensor([[0, 96]])).ids.tolist() == [[0, 96]]
    assert as_batch(llama, torch.tensor([[0, 96]], dtype=torch.int32)).split == "all"
    for wrong, named in ((97, 97), (-1, -1), (200, 200)):
        with pytest.raises(LyapunovPruneError, match=f"{named} .*vocabulary of 97"):
            as_batch(llama, torch.tensor([[0, wrong]]))
    with pytest.raises(LyapunovPruneError, match=r"torch\.float32"):
        as_batch(llama, torch.zeros(2, 4))
    with pytest.raises(LyapunovPruneError, match="a list"):
        as_batch(llama, batch([[1, 2]]))  # type: ignore[arg-type]


def test_a_context_may_be_as_long_as_the_model_s() -> None:
    model = make_tiny("llama", max_position_embeddings=16)
    as_batch(model, torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(LyapunovPruneError, match=r"17 .*model's 16"):
        as_batch(model, torch.zeros(1, 17, dtype=torch.int64))


def leaking(run: int, width: int = 80) -> tuple[TokenBatch, TokenBatch]:
    """Two texts that share a run of so many tokens, inside windows."""
    first, second = torch.arange(width).view(1, -1), torch.arange(1000, 1000 + width).view(1, -1)
    second[0, 3 : 3 + run] = first[0, 5 : 5 + run]
    return batch(first), batch(second)


def test_a_run_of_64_tokens_is_a_leak_and_one_of_63_is_none() -> None:
    require_disjoint(*leaking(LEAK_TOKENS - 1))
    with pytest.raises(LyapunovPruneError, match="share 64 tokens"):
        require_disjoint(*leaking(LEAK_TOKENS))


def test_a_run_over_the_end_of_a_window_is_a_leak() -> None:
    rows = torch.arange(160).view(4, 40)
    other = torch.arange(1000, 1160)
    other[10:74] = torch.arange(20, 84)  # over two windows of the first, and of the second
    require_disjoint(batch(rows), batch(torch.arange(1000, 1160).view(4, 40)))
    with pytest.raises(LyapunovPruneError, match="share 64 tokens"):
        require_disjoint(batch(rows), batch(other.view(4, 40)))


def test_of_short_windows_a_whole_one_is_a_leak() -> None:
    with pytest.raises(LyapunovPruneError, match="share 4 tokens"):
        require_disjoint(batch(IDS), batch(torch.tensor([[90, 91, 4, 5, 6, 7, 92, 93]])))
    require_disjoint(batch(IDS), batch(torch.tensor([[90, 91, 4, 5, 6, 92, 93, 94]])))


def test_what_it_was_measured_on_says_how_much_is_shared(llama: PreTrainedModel) -> None:
    one, other = leaking(70)
    seen = one.measured_on(llama, seed=3)
    assert (seen.tokens, seen.context, seen.seed, seen.split, seen.bos) == (80, 80, 3, "all", False)
    assert one.shared_with(seen) == 80
    assert 64 <= other.shared_with(seen) <= 80
    assert batch(torch.arange(2000, 2080).view(1, -1)).shared_with(seen) == 0


ENCODED = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


@pytest.mark.parametrize(
    "given",
    [
        BatchEncoding(ENCODED),
        ENCODED,
        {"input_ids": IDS.tolist()},
        DataLoader(TensorDataset(IDS), batch_size=2),
        DataLoader([{"input_ids": row} for row in IDS], batch_size=2),
        DataLoader(IDS),
    ],
    ids=["encoding", "dictionary", "lists", "loader of tuples", "loader of dictionaries", "loader of rows"],
)
def test_ids_are_taken_as_tokenizers_and_loaders_give_them(given: Any, llama: PreTrainedModel) -> None:
    assert as_batch(llama, given).ids.tolist() == IDS.tolist()
    expected = lp.perplexity(llama, IDS)
    assert lp.perplexity(llama, given).value == expected.value


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])}, "padding"),
        ({"input_ids": [[1, 2], [1, 2, 3]]}, "different lengths"),
        ({"labels": IDS}, "input_ids"),
        (DataLoader([IDS[0], IDS[0, :3]], batch_size=None), "different lengths"),
        (DataLoader([]), "different lengths"),
    ],
    ids=["padding", "ragged", "no ids", "ragged loader", "empty loader"],
)
def test_what_holds_no_windows_of_one_length_is_refused(given: Any, named: str, llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match=named):
        as_batch(llama, given)
