"""Logits compared a block of positions at a time are the logits compared whole, and hide nothing that these show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import make_tiny, other_head
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune import remove_layers, verify_removal
from lyapunov_prune.forward import scoring
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import deviation, uncached_logits
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.gate import GateReport

VOCABULARY = 97


@pytest.fixture(autouse=True)
def _blocks_of_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_ENTRIES", 7 * VOCABULARY + 3)


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, shape, generator=generator) for shape in ((2, 20), (1, 40), (1, 5))]


def whole(model: PreTrainedModel, reference: PreTrainedModel, inputs: list[torch.Tensor]) -> float:
    return max(deviation(uncached_logits(model, ids), uncached_logits(reference, ids)) for ids in inputs)


def formed(model: PreTrainedModel, counts: list[int]) -> None:
    """Note of every call of the head for how many positions it forms logits."""
    head: nn.Module = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: counts.append(output.shape[:-1].numel()))


@torch.no_grad()
def test_blocks_tell_what_the_whole_tells(family: str, inputs: list[torch.Tensor]) -> None:
    model = make_tiny(family).double()
    other = remove_layers(model, [2])
    assert KeptLogits(wrap(other), inputs).deviation(KeptLogits(wrap(model), inputs)) == pytest.approx(
        whole(other, model, inputs), rel=1e-9
    )
    assert KeptLogits(wrap(model), inputs).deviation(KeptLogits(wrap(model), inputs)) < 1e-14


@torch.no_grad()
def test_no_more_than_a_block_is_formed(inputs: list[torch.Tensor]) -> None:
    model = make_tiny("gemma3")
    counts: list[int] = []
    formed(model, counts)
    KeptLogits(wrap(model), inputs).deviation(KeptLogits(wrap(model), inputs))
    assert max(counts) == 32  # tokens that the states are tried on: 16 a window, and 32 by the scorer
    assert counts.count(7) >= 2 * (40 // 7 + 40 // 7)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["cohere", "gemma2", "granite"])
def test_what_a_forward_does_to_logits_is_in_them(model_type: str, inputs: list[torch.Tensor]) -> None:
    """A scale, a cap: these logits are not the head's product of the final state."""
    model, other = other_head(model_type), other_head(model_type)
    for parameter in find_structure(other).layers[0].parameters():
        parameter.mul_(1.01)
    told = KeptLogits(wrap(other), inputs).deviation(KeptLogits(wrap(model), inputs))
    assert told == pytest.approx(whole(other, model, inputs), rel=1e-3)
    other.config.logit_scale = other.config.logits_scaling = other.config.final_logit_softcapping = 7.0
    other.logit_scale = other.logits_scaling = 7.0
    changed = KeptLogits(wrap(other), inputs).deviation(KeptLogits(wrap(model), inputs))
    assert changed == pytest.approx(whole(other, model, inputs), rel=1e-3)
    assert changed > 1.5 * told


class Tilted(nn.Module):
    """A head that does more to later positions, by one part in ten thousand, than a state alone can tell."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head, self.weight, self.bias = head, head.weight, head.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * (1 + 1e-4 * (x.shape[0] > 1))


@torch.no_grad()
def test_logits_that_go_by_more_than_the_state_are_compared_whole(inputs: list[torch.Tensor]) -> None:
    model, other = make_tiny("llama"), make_tiny("llama")
    other.lm_head = Tilted(other.lm_head)  # type: ignore[assignment]
    told = KeptLogits(wrap(other), inputs).deviation(KeptLogits(wrap(model), inputs))
    assert told == pytest.approx(whole(other, model, inputs), rel=1e-3)
    assert told > 5e-5


@torch.no_grad()
def test_a_forward_that_forms_all_its_logits_is_compared_whole(inputs: list[torch.Tensor]) -> None:
    model, other = make_tiny("llama"), make_tiny("llama")
    find_structure(other).layers[0].mlp.down_proj.weight[0, 0] += 0.1  # type: ignore[union-attr, operator]
    wanted, forward = whole(other, model, inputs), other.forward
    other.forward = lambda input_ids, use_cache=None: forward(input_ids, use_cache=use_cache)  # type: ignore[method-assign]
    counts: list[int] = []
    formed(other, counts)
    assert KeptLogits(wrap(other), inputs).deviation(KeptLogits(wrap(model), inputs)) == pytest.approx(wanted, rel=1e-3)
    assert counts == [ids.numel() for ids in inputs]


@torch.no_grad()
def test_logits_that_are_not_finite_deviate_by_infinity(inputs: list[torch.Tensor]) -> None:
    model, other = make_tiny("llama"), make_tiny("llama")
    other.model.norm.weight[0] = float("nan")
    assert KeptLogits(wrap(other), inputs).deviation(KeptLogits(wrap(model), inputs)) == float("inf")


# The gate, with and without blocks.


@contextmanager
def _whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(scoring, "_ENTRIES", 2**30)
        yield


def measured(report: GateReport) -> list[tuple[str, bool, float]]:
    return [(check.name, check.passed, check.measured) for check in report.checks]


def test_the_gate_measures_the_same(family: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny(family)
    pruned = remove_layers(model, [1, 3] if "inverse" not in family else [1])
    plan = [1, 3] if "inverse" not in family else [1]
    blocks = verify_removal(model, pruned, plan, ids)
    with _whole(monkeypatch):
        at_once = verify_removal(model, pruned, plan, ids)
    for (name, passed, found), (_, wanted, number) in zip(measured(blocks), measured(at_once), strict=True):
        assert passed == wanted, name
        assert found == pytest.approx(number, abs=2e-6), name


def scaled_row(pruned: PreTrainedModel) -> None:
    pruned.get_output_embeddings().weight.data[5] *= 1.001


def scaled_logits(pruned: PreTrainedModel) -> None:
    pruned.get_output_embeddings().register_forward_hook(lambda module, args, output: output * (1 + 3e-5))


def cap(pruned: PreTrainedModel) -> None:
    pruned.register_forward_hook(
        lambda module, args, output: setattr(output, "logits", 30 * (output.logits / 30).tanh())
    )


def other_norm(pruned: PreTrainedModel) -> None:
    find_structure(pruned).backbone.norm.weight.data[3] += 1e-3


@pytest.mark.parametrize("fault", [scaled_row, scaled_logits, cap, other_norm])
def test_faults_behind_the_layers_are_seen(fault: Callable[[PreTrainedModel], None], ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    pruned = remove_layers(model, [1, 3])
    assert verify_removal(model, pruned, [1, 3], ids).passed
    fault(pruned)
    assert "same as skipping" in verify_removal(model, pruned, [1, 3], ids).failure()
