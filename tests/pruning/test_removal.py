"""Cut, then proven once: how often each path goes through the gate, and what it does with the verdict."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from families.zoo import make_zoo
from helpers import make_mixture, on_disk, operated
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import PruningPlan, remove_layers, verify_removal
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.export import disk_gate
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.forward.masking import masked_experts
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.families import TRUSTED
from lyapunov_prune.models.mixtures import find_mixtures
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning import removal, surgery
from lyapunov_prune.pruning.edit import filled
from lyapunov_prune.pruning.gate import SKIPPED
from lyapunov_prune.pruning.removed import ExpertsGone, PartsGone

TRUSTED_ONE, OTHER, WRAPPED = "llama", "olmo2", "gemma3"
NAMES = (TRUSTED_ONE, OTHER, WRAPPED)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each gate was entered, by whichever module of the package."""
    calls: Counter[str] = Counter()

    def counted(name: str, verify: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return verify(*args, **kwargs)

        return call

    for name, verify in (("memory", removal.check_removal), ("disk", disk_gate.verify_files)):
        for module in [m for title, m in sys.modules.items() if title.startswith("lyapunov_prune.")]:
            if vars(module).get(verify.__name__) is verify:
                monkeypatch.setattr(module, verify.__name__, counted(name, verify))
    return calls


def test_the_families_are_of_the_three_sorts() -> None:
    models = [make_zoo(name) for name in NAMES]
    assert [find_structure(model).model_type in TRUSTED for model in models[:2]] == [True, False]
    assert [wrap(model).wrapped for model in models] == [False, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_the_cut_proves_nothing(name: str, gates: Counter[str]) -> None:
    assert find_structure(operated(make_zoo(name), [2, 5])).num_layers == 6
    assert gates == {}


@pytest.mark.parametrize("name", NAMES)
def test_in_memory_what_the_tests_do_not_vouch_for_is_proven_once(name: str, gates: Counter[str]) -> None:
    model, once = make_zoo(name), int(name != TRUSTED_ONE)
    remove_layers(model, [2, 5])
    assert gates["memory"] == once
    with pytest.raises(LyapunovPruneError):
        remove_layers(model, PruningPlan.given(model, PartsGone((), (2,))))
    plans = [PruningPlan.given(model, remove) for remove in ([2], [2, 5])]
    for plan in plans:
        remove_layers(model, plan)
    assert gates == ({"memory": 3} if once else {})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_proven_once_on_its_files(
    name: str, gates: Counter[str], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_zoo(name)
    plan = PruningPlan.given(model, [2])
    assert write_pruned(model, tokenizer, plan, tmp_path / "pruned").gate.passed
    assert gates == {"memory": 1}


@pytest.mark.parametrize("name", [TRUSTED_ONE, OTHER])
def test_on_disk_the_gate_on_files_is_the_one(
    name: str, gates: Counter[str], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make_zoo(name).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    on_disk(tmp_path / "source", tmp_path / "disk")
    assert gates == {"disk": 1}


def test_an_unvouched_family_that_fails_is_not_written(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The layer that becomes the last lacks its bias."""
    model = make_zoo("gpt_neox_japanese")
    with pytest.raises(LyapunovPruneError, match="cannot be removed correctly"):
        write_pruned(model, tokenizer, PruningPlan.given(model, [7]), tmp_path / "pruned")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", [TRUSTED_ONE, OTHER])
def test_a_model_that_cannot_be_saved_fails_the_gate(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inconsistent(self: PreTrainedModel, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("two tensors\nshare memory")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", inconsistent)
    model = make_zoo(name)
    with pytest.raises(CheckFailed, match="reloads as saved: RuntimeError"):
        write_pruned(model, tokenizer, PruningPlan.given(model, [2]), tmp_path / "pruned")
    assert os.listdir(tmp_path) == []


def expert_plan(model: PreTrainedModel, *, remove: tuple[int, ...] = ()) -> PruningPlan:
    """Two experts of each layer, one of each group where there are two, beside whole layers."""
    layers = [layer for layer in find_mixtures(find_structure(model)).layers if layer not in remove]
    return PruningPlan.given(model, ExpertsGone(tuple(remove), {i: (0, 4 + i) for i in layers}))


# export/test_experts_on_disk.py writes every mixture through the same gate.
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "longcat_flash"])
def test_a_mixture_without_some_experts_loads_in_plain_transformers(name: str, tmp_path: Path) -> None:
    model = make_mixture(name)
    plan = expert_plan(model)
    made = write_pruned(model, None, plan, tmp_path / "out")
    assert made.gate.passed
    assert next(check.measured for check in made.gate.checks if check.name == SKIPPED) <= 1e-6
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(97, (1, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), masked_experts(wrap(model), plan.gone.experts_gone):
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)
    assert find_mixtures(find_structure(again)).router.experts == 6
    card = (tmp_path / "out" / "README.md").read_text()
    assert "expert-pruning" in card
    assert "| 1 | 0, 5 |" in card


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_and_experts_go_together(dtype: torch.dtype) -> None:
    model = make_mixture("qwen3_moe").to(dtype)
    plan = expert_plan(model, remove=(1,))
    pruned = remove_layers(model, plan)
    structure = find_structure(pruned)
    assert (structure.num_layers, find_mixtures(structure).router.experts) == (2, 6)
    assert verify_removal(model, pruned, plan).passed
    assert verify_removal(model, pruned, expert_plan(model)).failure()


@pytest.mark.parametrize("part", ["experts", "router"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "longcat_flash"])
def test_two_experts_that_are_swapped_fail_the_gate(
    name: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(edit: Any, decoder: Any, **options: Any) -> Any:
        made = filled(edit, decoder, **options)
        mixture = made.mixtures.layers[1]
        for parameter in made.layers[1].get_submodule(getattr(mixture, part)).parameters():
            parameter.data[[0, 1]] = parameter.data[[1, 0]]
        return made

    monkeypatch.setattr(surgery, "filled", swapped)
    model = make_mixture(name)
    with pytest.raises(CheckFailed, match=SKIPPED):
        write_pruned(model, None, expert_plan(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()
