"""Blocks of a file that make up for the errors of earlier ones, held against least squares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_tiny, make_tokenizer
from transformers import PreTrainedModel

from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.feedback import fed_back, fed_forward, written_by_itself
from lyapunov_prune.budget.schemes import DENSE, Schemes
from lyapunov_prune.budget.storage import Storage
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.export.packed import Scheme
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.ggml import Kind, dequantised, quantised
from lyapunov_prune.models.how import How, Stored

BLOCK, COLUMNS = 32, 128
KINDS = (Kind.Q4_0, Kind.IQ4_NL, Kind.Q5_1)


def inputs_and_matrix(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (columns × tokens, float64) of which a few directions carry most, and a matrix of 24 rows."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(COLUMNS, 8, generator=random).double() @ torch.randn(8, 600, generator=random).double()
    return mixed + torch.randn(COLUMNS, 600, generator=random), torch.randn(24, COLUMNS, generator=random)


def rounded(W: np.ndarray, kind: Kind) -> torch.Tensor:
    return torch.from_numpy(dequantised(quantised(W, kind, np.ones(W.shape[1])), kind))


def with_feedback(W: torch.Tensor, kind: Kind, X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each block was rounded from, and the numbers of what is stored."""
    P = torch.empty_like(W)

    def stored(V: np.ndarray, columns: slice) -> Stored:
        P[:, columns] = torch.from_numpy(V)
        return BLOCKS.stored(V, kind, np.ones(BLOCK, np.float32))

    made, Q = fed_back(W, BLOCK, X @ X.T, stored, lambda each: BLOCKS.read(each, kind))
    assert torch.equal(torch.from_numpy(BLOCKS.read(made, kind)), Q)
    return P, Q


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_is_the_rounding_of_the_least_squares_solution_behind_the_earlier_ones(kind: Kind) -> None:
    X, W = inputs_and_matrix(0)
    P, Q = with_feedback(W, kind, X)
    done = torch.zeros(COLUMNS, dtype=torch.bool)
    for block in X.square().sum(1).view(-1, BLOCK).sum(1).argsort(descending=True).tolist():
        best, here = W.double(), slice(BLOCK * block, BLOCK * (block + 1))
        best[:, ~done] += torch.linalg.lstsq(X[~done].T, ((W - Q)[:, done].double() @ X[done]).T).solution.T
        torch.testing.assert_close(P[:, here], best[:, here].float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(Q[:, here], rounded(P[:, here].numpy(), kind), rtol=0, atol=0)
        done[here] = True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_outputs_move_less_than_without(kind: Kind, seed: int) -> None:
    X, W = inputs_and_matrix(seed)
    moved = [Q.double() @ X - W.double() @ X for Q in (with_feedback(W, kind, X)[1], rounded(W.numpy(), kind))]
    assert moved[0].norm() < moved[1].norm()


def model_and_reading() -> tuple[PreTrainedModel, Reading]:
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = make_tiny("llama", **sizes, max_position_embeddings=640, tie_word_embeddings=True)
    model.config._name_or_path = "tiny"
    ids = torch.randint(len(VOCABULARY), (4, 32), generator=torch.Generator().manual_seed(1))
    return model, read(wrap(model), TokenBatch(ids, "a", "all", False))


@pytest.mark.parametrize("storage", ["file", "folder"])
def test_what_is_written_is_what_the_later_layers_were_given(storage: str, tmp_path: Path) -> None:
    """The bytes, made of what is handed on, read back to the blocks that feedback chose with the earlier layers."""
    model, reading = model_and_reading()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    where: Storage = BLOCKS if storage == "file" else Schemes(reading.decoder)
    some, none = (Kind.Q4_0, Kind.F16) if storage == "file" else (Scheme(4, 32), DENSE)
    wide = ("o_proj",) if storage == "file" else ("o_proj", "embed_tokens")
    random = np.random.default_rng(0)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    chosen = {
        name: How(none if any(each in name for each in wide) else some, random.exponential(size=p.shape[1]) + 0.1)
        for name, p in matrices.items()
    }
    target = tmp_path / ("x.gguf" if storage == "file" else "x")
    plain = where.made(reading.decoder, make_tokenizer(), target, chosen).decoder.model
    found = fed_forward(written_by_itself(reading), where, chosen, plain)
    assert all((how.stored is None) == any(each in name for each in wide) for name, how in found.items())
    made = where.made(reading.decoder, make_tokenizer(), target, found).decoder.model
    for name, p in matrices.items():
        assert torch.equal(made.get_parameter(name), plain.get_parameter(name))
        assert not torch.equal(made.get_parameter(name), p)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_the_inputs_of_the_head_are_those_of_a_forward_of_the_text_that_it_wrote() -> None:
    _, reading = model_and_reading()
    own = written_by_itself(reading, seed=3)
    assert own.reading.batch.ids.shape == reading.batch.ids.shape
    with torch.no_grad():
        states = final_state(reading.structure, own.reading.batch.ids)[:, :-1].flatten(0, 1).double()
    torch.testing.assert_close(own.head, states.T @ states, rtol=1e-4, atol=1e-4)
