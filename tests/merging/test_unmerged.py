"""The unmerged model: what it computes inside `cut` is what the compact model of its merge computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families.zoo import make_zoo
from helpers import IMAGE_MODELS, hooks_of, make_classifier, make_tiny
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_gate import cut_by_hooks
from lyapunov_prune.forward.logits import deviation, uncached_logits
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.merging.unmerged import Constant, Unmerged
from lyapunov_prune.models.decoder import wrap_any
from lyapunov_prune.models.structure import find_layers

PLAIN = ("gpt2", "gpt_neox", "opt", "vit", "deit")
GATED = ("llama", "gemma2", "gemma3", "phi3")  # test_merge.py takes those with Llama's block too
ZOO = {"granite": "scaled", "olmo2": "mean-gate", "phi": "identity"}  # families of the zoo alone
PAIRS = [*ZOO.items()]
PAIRS += [(n, r) for n in PLAIN for r, known in REDUCTIONS.items() if "plain" in known.blocks]
PAIRS += [(n, r) for n in GATED for r, known in REDUCTIONS.items() if "gated" in known.blocks]


def subject(name: str, dtype: torch.dtype = torch.float64) -> tuple[PreTrainedModel, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    if name in IMAGE_MODELS:
        return make_classifier(name).to(dtype), torch.randn(9, 1, 8, 8, generator=generator).to(dtype)
    return (make_zoo if name in ZOO else make_tiny)(name).to(dtype), torch.randint(3, 97, (5, 17), generator=generator)


def unmerged(name: str, reduction: str, dtype: torch.dtype = torch.float64) -> tuple[Any, PreTrainedModel, Any]:
    model, inputs = subject(name, dtype)
    return copy.deepcopy(Unmerged(wrap_any(model), reduction, lambda: uncached_logits(model, inputs))), model, inputs


@pytest.mark.parametrize(("name", "reduction"), PAIRS)
@torch.no_grad()
def test_cut_is_what_its_merge_computes(name: str, reduction: str) -> None:
    """In float64 to 1e-12, of weights that have moved since the stand-ins were made; in float32 to its limit."""
    rounded = [(torch.float32, 1e-4)] if name in ("gpt2", "llama", "vit") else []
    for dtype, limit in ((torch.float64, 1e-12), *rounded):
        student, dense, inputs = unmerged(name, reduction, dtype)
        before = uncached_logits(student.model, inputs)
        for p in find_layers(student.model).layers.parameters():
            p.mul_(1.1)
        moved = uncached_logits(student.model, inputs)
        with student.cut((0, 3), (1, 3)) as model:
            logits = uncached_logits(model, inputs)
        assert torch.equal(uncached_logits(student.model, inputs), moved)
        cuts = Cuts((0, 3), student.merged((1, 3)))
        with cut_by_hooks(student.decoder, cuts):
            reference = uncached_logits(student.model, inputs)
        assert deviation(logits, reference) <= limit
        assert deviation(uncached_logits(make_compact(student.model, cuts), inputs), logits) <= limit
        assert deviation(logits, moved) > 1e-3
        assert torch.equal(uncached_logits(dense, inputs), before)
        assert hooks_of(student.model) == hooks_of(dense)


def test_the_stand_ins_are_fitted_on_the_dense_model() -> None:
    student, dense, inputs = unmerged("llama", "mean-gate")
    gates: list[torch.Tensor] = []
    act = find_layers(dense).layers[2].mlp.act_fn
    handle = act.register_forward_hook(lambda module, args, output: gates.append(output))
    uncached_logits(dense, inputs)
    handle.remove()
    with student.cut((), (2,)):
        stand_in = student.layers[2].mlp.act_fn
        assert isinstance(stand_in, Constant)
        torch.testing.assert_close(stand_in.c, gates[0].flatten(0, -2).mean(0))


def test_copies_learn_apart_and_an_affine_block_learns() -> None:
    student, _, inputs = unmerged("llama", "affine")
    other = copy.deepcopy(student)
    with other.cut((), (2,)) as model:
        matrix = other.layers[2].mlp
        assert isinstance(matrix, nn.Linear)
        uncached_logits(model, inputs).square().sum().backward()
        assert matrix.weight.grad is not None
        with torch.no_grad():
            matrix.weight.add_(1.0)
    assert torch.equal(other.merged((2,))[2][0], student.merged((2,))[2][0] + 1.0)


def test_modules_are_back_after_an_exception() -> None:
    student, _, _ = unmerged("llama", "scaled")
    before = list(student.model.modules())
    with pytest.raises(KeyboardInterrupt), student.cut((0, 1), (1,)):
        raise KeyboardInterrupt
    assert list(student.model.modules()) == before


def test_a_reduction_that_is_not_for_the_block_is_refused() -> None:
    with pytest.raises(LyapunovPruneError, match=r"identity .*gated"):
        unmerged("llama", "identity")
