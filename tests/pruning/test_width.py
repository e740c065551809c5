"""Hidden channels leave every feed-forward block: chosen by what they cost, cut exactly, and proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, Done, make_tiny
from helpers.tiny_models import SMALL, from_settings, with_large_weights
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, PruningPlan, load, remove_layers, verify_removal
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.feedforward import BlockParts, find_feedforward
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.pruning import width
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.pruning.removal import COPIED
from lyapunov_prune.pruning.width import channel_costs, choose_channels, staying

OTHERS = ("gpt_bigcode", "granite", "olmo2")


def make(family: str, **changes: Any) -> PreTrainedModel:
    if family in TINY:
        return make_tiny(family, **changes)
    return with_large_weights(from_settings(family, **{**SMALL, **changes}))


def parts(model: PreTrainedModel, layer: int) -> BlockParts:
    structure = wrap(model).structure
    return find_feedforward(structure, layer).parts(structure.layers[layer])


@pytest.mark.parametrize("family", [*TINY, *OTHERS])
def test_every_family_loses_channels_and_passes_the_gate(family: str, ids: torch.Tensor) -> None:
    model = make(family)
    plan = choose_channels(model, ids, 0.25)
    pruned = remove_layers(model, plan)
    report = verify_removal(model, pruned, plan, ids)
    assert report.passed, report.failure()
    assert COPIED in report.to_frame()["check"].tolist()
    kept = plan.gone.width - plan.gone.fewer
    assert (plan.gone.width, kept % 8, parts(pruned, 2).out[0].shape[1]) == (parts(model, 2).out[0].shape[1], 0, kept)
    assert kept < plan.gone.width


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "opt"])
@pytest.mark.parametrize("matrix", ["up", "out"])
def test_two_swapped_channels_fail_the_gate(family: str, matrix: str, ids: torch.Tensor) -> None:
    model = make(family)
    plan = choose_channels(model, ids, 0.25)
    pruned = remove_layers(model, plan)
    weight = getattr(parts(pruned, 3), matrix)[0]
    swapped = weight if matrix == "up" else weight.T
    with torch.no_grad():
        swapped[[0, 1]] = swapped[[1, 0]].clone()
    failed = [check.name for check in verify_removal(model, pruned, plan, ids).checks if not check.passed]
    assert {"same as skipping", COPIED} <= set(failed)


def test_another_channel_than_that_of_the_plan_fails_the_gate(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    plan = choose_channels(llama, ids, 8)
    first = plan.gone.channels[0][0]
    stays = next(i for i in range(plan.gone.width) if i not in first)
    other = replace(
        plan, gone=replace(plan.gone, channels=((tuple(sorted((*first[1:], stays))),), *plan.gone.channels[1:]))
    )
    report = verify_removal(llama, remove_layers(llama, other), plan, ids)
    assert not report.passed


@pytest.mark.parametrize("score", list(width.SCORES))
def test_scores_are_the_errors_that_they_say(score: str) -> None:
    """Against the error itself: of a zero channel, and of a zero channel with all others refitted."""
    generator = torch.Generator().manual_seed(0)
    W, h = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5, 7), (40, 7)))
    G = h.T @ h
    H = G + 0.01 * G.diagonal().mean() * torch.eye(7, dtype=torch.float64)
    wanted = []
    for j in range(7):
        keep = [i for i in range(7) if i != j]
        error = W.clone()
        if score == "surgeon":
            error[:, keep] -= W @ H[:, keep] @ torch.linalg.inv(H[keep][:, keep])
        else:
            error[:, keep] = 0
        wanted.append((error @ (H if score == "surgeon" else G) @ error.T).trace())
    found = width.SCORES[score].cost(W, Statistics(G.diagonal().sqrt(), G))
    assert torch.allclose(found, torch.stack(wanted), rtol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_by_token_an_error_is_relative_to_the_output_of_its_token(family: str, ids: torch.Tensor) -> None:
    reading = read(wrap(make_tiny(family).double()), ids)
    for (costs,), (unit,) in zip(channel_costs(reading, "token").costs, reading.decoder.units, strict=True):
        W, wanted = unit.out.weight(reading.model), torch.zeros(unit.width, dtype=torch.float64)

        def add(module: nn.Module, args: Any, kwargs: Any, y: torch.Tensor, W: Any = W, sums: Any = wanted) -> None:
            for h, out in zip(args[0].flatten(0, -2), y.flatten(0, -2), strict=True):
                sums += (h * W).square().sum(0) / (out @ out)

        with torch.no_grad(), hooked(after=[(reading.model.get_submodule(unit.out.module), add)]):
            reading.model(ids)
        assert costs is not None
        assert torch.allclose(costs, wanted, rtol=1e-9)


def test_a_channel_that_nothing_depends_on_goes_first(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    with torch.no_grad():
        for layer in range(6):
            parts(model, layer).out[0][:, 10:18] = 0
    for score in width.SCORES:
        assert set(choose_channels(model, ids, 8, score=score).gone.channels) == {(tuple(range(10, 18)),)}


@pytest.mark.parametrize(
    ("wide", "remove", "stay"),
    [(1536, 0.2, 1216), (8960, 0.2, 7168), (48, 0.2, 40), (48, 8, 40), (512, 100, 384), (10, 0.2, 8)],
)
def test_what_stays_is_a_multiple(wide: int, remove: int | float, stay: int) -> None:
    assert staying(wide, remove) == stay


@pytest.mark.parametrize("remove", [0, 48, 100, 0.01, 0.99, 1.5, -3])
def test_none_or_all_channels_are_refused(remove: int | float) -> None:
    with pytest.raises(LyapunovPruneError, match="48 channels"):
        staying(48, remove)


def test_a_plan_of_channels_saves_and_loads(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    plan = choose_channels(llama, ids, 0.25)
    again = PruningPlan.load(plan.save(tmp_path / "plan.json"))
    assert (again.gone, again.gone.width, str(again)) == (plan.gone, 48, str(plan))
    assert "16 of 48" in plan.sentence()
    assert plan.touched == tuple(range(6))
    assert plan.drops_parts


@pytest.mark.parametrize(
    "change",
    [
        {"channels": (((0, 1),),)},
        {"channels": (((0, 1),),) * 5 + (((0,),),)},
        {"channels": (((1, 0),),) * 6},
        {"channels": (((0, 0),),) * 6},
        {"channels": (((0, 48),),) * 6},
        {"channels": (((),),) * 6},
        {"channels": ((),) * 6},
        {"widths": ((2,),) * 6},
        {"channels": ()},
        {"remove": (1,)},
        {"remove": (1,), "channels": (((0, 1),), (), ((0, 1),), (), ((0, 1),), ((0, 1),))},
    ],
)
def test_a_plan_of_other_channels_is_refused(change: dict[str, Any], llama: PreTrainedModel, ids: torch.Tensor) -> None:
    plan = choose_channels(llama, ids, 8)
    gone = replace(plan.gone, channels=(((0, 1),),) * 6)
    with pytest.raises(LyapunovPruneError, match="channels"):
        replace(plan, gone=replace(gone, **change))


def test_from_the_command_line_to_a_smaller_checkpoint(run: Callable[..., Done], run_bad: Callable[..., str]) -> None:
    text = ("--text", "builtin", "--tokens", "512", "--context", "64")
    done = run("prune", "tiny", "--what", "width", "--remove", "25%", *text, "-o", "smaller")
    assert done.code == 0, done.err
    made = Provenance.load(Path("smaller") / PROVENANCE)
    assert (made.plan.gone.width, made.plan.gone.fewer, len(made.plan.gone.kept_channels)) == (48, 16, 6)
    assert made.gate.passed
    pruned = load("smaller").model
    assert pruned.config.intermediate_size == 32
    assert run("eval", "smaller", "--against", "tiny", *text).code == 0
    made.plan.save(Path("plan.json"))
    done = run("prune", "tiny", "--plan", "plan.json", *text, "-o", "again")
    assert done.code == 0, done.err
    assert wrap(load("again").model).identity.weights == wrap(pruned).identity.weights
    for given, said in (
        (("--remove", "2", "--criterion", "bi"), "--criterion"),
        (("--remove", "2", "--protect", "1"), "--protect"),
        (("--remove", "25%", "--mend"), "--mend"),
        (("--remove", "1"), "48 channels"),
        (("--layers", "1"), "--remove"),
    ):
        assert said in run_bad("prune", "tiny", "--what", "width", *given, *text, "-o", "other")
    assert "prune --what width" in run_bad("rank", "tiny", "--what", "width")
