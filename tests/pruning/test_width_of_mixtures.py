"""Channels leave every expert: by what its own tokens say, against float64 references with the experts unfused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families.zoo import make_zoo
from helpers.unfused import LAYER, mixture, reference, unfused

from lyapunov_prune import remove_layers, verify_removal
from lyapunov_prune.data.batch import checked_batch
from lyapunov_prune.forward.reading import read
from lyapunov_prune.mending.refit import refit_blocks, refitted
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.units import Unit
from lyapunov_prune.pruning.removal import COPIED, check_removal
from lyapunov_prune.pruning.surgery import Operation, cut
from lyapunov_prune.pruning.width import channel_costs, choose_channels

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.fixture
def text() -> torch.Tensor:
    """So few tokens that the router sends some experts fewer than their matrices have inputs."""
    return torch.randint(3, 90, (3, 22), generator=torch.Generator().manual_seed(0))


def experts_of(model: object) -> list[tuple[int, Unit]]:
    """The units of the layer's experts, with their index in it."""
    units = wrap(model).units[LAYER]  # type: ignore[arg-type]
    return [(j, unit) for j, unit in enumerate(units) if unit.out.expert is not None]


@pytest.mark.parametrize("kind", FAMILIES)
def test_costs_are_those_of_the_unfused_experts(kind: str, text: torch.Tensor) -> None:
    model = mixture(kind)
    wanted = reference(model, text)
    costs = channel_costs(read(wrap(model), text)).costs[LAYER]
    for j, unit in experts_of(model):
        found = costs[j]
        assert found is not None
        W, gram = unit.out.weight(model), wanted[unit.out.name].gram
        assert gram is not None
        assert torch.allclose(found, W.square().sum(0) * gram.diagonal(), rtol=1e-9)


@pytest.mark.parametrize("kind", FAMILIES)
def test_without_channels_it_computes_what_the_unfused_experts_do_without_them(kind: str, text: torch.Tensor) -> None:
    """In float64, with the columns of the linear layers zero; two experts with each other's channels do not."""
    model = mixture(kind)
    plan = choose_channels(model, text, 0.5)
    slow, module, _ = unfused(model)
    for layer, units in enumerate(wrap(model).units):
        for unit, gone in zip(units, plan.gone.channels[layer], strict=True):
            if layer == LAYER and unit.out.expert is not None:
                module.linears["down_proj"][unit.out.expert].weight.data[:, list(gone)] = 0  # type: ignore[index]
            else:
                unit.out.weight(slow)[:, list(gone)] = 0
    first, second = plan.gone.channels[LAYER][:2]
    assert first != second
    swapped = replace(
        plan, gone=replace(plan.gone, channels=(plan.gone.channels[0], (second, first, *plan.gone.channels[LAYER][2:])))
    )
    right, wrong = (remove_layers(model, each) for each in (plan, swapped))
    with torch.no_grad():
        wanted, found, other = (each(text, use_cache=False).logits for each in (slow, right, wrong))
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(other, wanted, rtol=1e-3)
    assert not verify_removal(model, wrong, plan, text).passed


@pytest.mark.parametrize("kind", FAMILIES)
def test_refitted_matrices_are_those_of_the_unfused_experts(kind: str, text: torch.Tensor) -> None:
    """The first layer that is refitted sees what the dense model gives it."""
    model = mixture(kind)
    plan = choose_channels(model, text, 0.5)
    alone = replace(
        plan, gone=replace(plan.gone, channels=(tuple(() for _ in plan.gone.channels[0]), plan.gone.channels[LAYER]))
    )
    wanted = reference(model, text)
    _, refits = refit_blocks(wrap(model), alone.gone.kept_channels, read(wrap(model), text))
    for j, unit in experts_of(model):
        gram, kept = wanted[unit.out.name].gram, alone.gone.kept_channels[LAYER][j]
        assert gram is not None
        assert kept is not None
        assert torch.allclose(refits[LAYER, j], refitted(unit.out.weight(model), gram, kept), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3", "gpt_oss", "dbrx"])
def test_refitted_experts_pass_the_gate(kind: str, text: torch.Tensor) -> None:
    """And two columns that change places in one expert do not."""
    model = make_zoo(kind)
    plan, batch = choose_channels(model, text, 0.5), checked_batch(wrap(model).structure, text)
    _, refits = refit_blocks(wrap(model), plan.gone.kept_channels, read(wrap(model), text))
    operation = Operation(plan, refits=refits)
    pruned = cut(wrap(model), operation)
    report = check_removal(wrap(model), pruned, operation, batch)
    assert report.passed, report.failure()
    unit = next(u for here in pruned.units for u in here if u.out.expert == 1)
    W = unit.out.weight(pruned.model)
    W[:, [0, 1]] = W[:, [1, 0]].clone()
    failed = [check.name for check in check_removal(wrap(model), pruned, operation, batch).checks if not check.passed]
    assert {"same as skipping", COPIED} <= set(failed)


@pytest.mark.parametrize("family", ["qwen2_moe", "jamba"])
def test_blocks_beside_the_experts(family: str, text: torch.Tensor) -> None:
    """Qwen's shared expert and dense layers have settings of their own and keep theirs; Jamba's lose channels too."""
    plan = choose_channels(make_zoo(family), text, 0.5)
    assert plan.gone.narrowed == "expert"
    beside = {len(gone) for here in plan.gone.channels for gone in here if len(here) == 1}
    assert beside == ({0} if family == "qwen2_moe" else {plan.gone.fewer})
    assert f"{plan.gone.fewer} of {plan.gone.width} hidden channels" in str(plan)
