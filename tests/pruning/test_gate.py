"""The gate catches what it is there for: every fault is planted once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from families.control import verify_intact
from families.zoo import make_zoo
from helpers import hooks_of, make_tiny
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lyapunov_prune import remove_layers, verify_removal
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.forward.logits import CACHE_LIMIT, last_logits
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure, identify
from lyapunov_prune.pruning import gate
from lyapunov_prune.pruning.gate import GateReport, deviation

REMOVE = [1, 3]


def wrong_layer_idx(pruned: PreTrainedModel) -> None:
    find_structure(pruned).layers[2].self_attn.layer_idx = 3


def changed_weight(pruned: PreTrainedModel) -> None:
    with torch.no_grad():
        find_structure(pruned).layers[0].mlp.down_proj.weight[0, 0] += 0.1


def hook_left_behind(pruned: PreTrainedModel) -> None:
    find_structure(pruned).layers[0].register_forward_hook(lambda module, args, output: output * 1.01)


def stale_layer_count(pruned: PreTrainedModel) -> None:
    pruned.config.num_hidden_layers += 1


def layer_left_in(pruned: PreTrainedModel) -> None:
    layers = find_structure(pruned).layers
    layers.append(copy.deepcopy(layers[0]))
    pruned.config.num_hidden_layers += 1


def stale_layer_types(pruned: PreTrainedModel) -> None:
    pruned.config.layer_types = list(reversed(pruned.config.layer_types))


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (wrong_layer_idx, "cached decoding"),
        (changed_weight, "same as skipping"),
        (hook_left_behind, "same as skipping"),
        (stale_layer_count, "reload"),
        (layer_left_in, "same as skipping"),
        (stale_layer_types, "same as skipping"),
    ],
)
def test_a_planted_fault_fails(fault: Callable[[PreTrainedModel], None], check: str, ids: torch.Tensor) -> None:
    model = make_tiny("gemma3" if fault is stale_layer_types else "llama")
    pruned = remove_layers(model, REMOVE)
    assert verify_removal(model, pruned, REMOVE, ids).passed
    fault(pruned)
    report = verify_removal(model, pruned, REMOVE, ids)
    assert not report.passed
    assert any(check in c.name for c in report.checks if not c.passed), f"\n{report}"


def test_removing_other_layers_than_planned_fails(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    report = verify_removal(llama, remove_layers(llama, [1, 2]), REMOVE, ids)
    assert "same as skipping" in report.failure()


def test_counting_looks_at_the_files(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    pruned = remove_layers(llama, REMOVE)
    pruned.save_pretrained(tmp_path)
    assert verify_removal(llama, pruned, REMOVE, ids, checkpoint=tmp_path).passed
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.extra": torch.zeros(3)}, file, metadata={"format": "pt"})
    report = verify_removal(llama, pruned, REMOVE, ids, checkpoint=tmp_path)
    assert "unexpected keys" in report.failure()
    assert not report.checks[-1].passed
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "missing keys" in verify_removal(llama, pruned, REMOVE, ids, checkpoint=tmp_path).failure()


def test_a_setting_that_short_inputs_cannot_show_is_compared(ids: torch.Tensor) -> None:
    """A window longer than the input changes no logits: the layers' settings are compared instead."""
    model = make_tiny("mistral", sliding_window=100)
    pruned = remove_layers(model, REMOVE)
    pruned.model.layers[1].self_attn.scaling_note = "other"  # any plain attribute that reloading loses
    report = verify_removal(model, pruned, REMOVE, ids)
    assert "layer 1 came back with self_attn.scaling_note" in report.failure()


def test_the_gate_leaves_no_hook_and_no_file(
    llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # other processes run their gates in /tmp
    pruned = remove_layers(llama, REMOVE)
    verify_removal(llama, pruned, REMOVE, ids)
    assert hooks_of(llama) == hooks_of(pruned) == 0
    assert not list(tmp_path.iterdir())


def test_the_report_saves_and_loads(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    pruned = remove_layers(llama, REMOVE)
    wrong_layer_idx(pruned)
    report = verify_removal(llama, pruned, REMOVE, ids)
    again = GateReport.load(report.save(tmp_path / "gate.json"))
    assert again == report
    assert "FAILED" in str(again)


def test_the_report_says_which_model_and_tokens_it_looked_at(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    pruned, batch = remove_layers(llama, REMOVE), TokenBatch(ids, "a book", "calibration", False)
    seen = [
        report.measured_on
        for report in (
            verify_removal(llama, pruned, REMOVE, batch),
            verify_removal(llama, pruned, REMOVE, batch),
            verify_removal(llama, pruned, REMOVE, TokenBatch(ids.flip(1), "a book", "calibration", False)),
            verify_removal(llama, pruned, REMOVE),
            verify_intact(pruned, batch),
        )
    ]
    assert seen[0] == seen[1]
    assert len({on.text_hash for on in seen if on}) == 3
    first, random, intact = seen[0], seen[3], seen[4]
    assert first is not None
    assert (first.text, first.split, first.bos) == ("random tokens and the start of a book", "calibration", False)
    assert first.model == random.model == identify(llama)  # type: ignore[union-attr]
    assert random.text == "random tokens"  # type: ignore[union-attr]
    assert intact.model == identify(pruned)  # type: ignore[union-attr]


def test_a_report_of_an_older_version_loads(tmp_path: Path) -> None:
    (tmp_path / "gate.json").write_text('{"kind": "GateReport", "checks": []}')
    assert GateReport.load(tmp_path / "gate.json").measured_on is None


def test_deviation_is_relative_to_the_spread_of_a_token() -> None:
    z = torch.randn(2, 5, 97) + 100  # a common offset must not hide a difference
    assert deviation(z, z) == 0
    assert deviation(z + 1e-3 * torch.randn_like(z), z) == pytest.approx(1e-3, rel=0.5)
    assert deviation(z * float("nan"), z) == float("inf")
    assert deviation(z[:1], z) == float("inf")


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_worst_input_decides_whether_the_cache_is_right(
    wrong: int, llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the deviation of the last input is taken."""
    inputs = [ids[:1], ids[1:2, :30]]

    def cached(model: PreTrainedModel, given: torch.Tensor, *, positions: bool = False) -> torch.Tensor:
        logits = last_logits(model, given)
        return logits.roll(1, -1) if given is inputs[wrong] else logits

    monkeypatch.setattr(gate, "cached_logits", cached)
    with torch.no_grad():
        check = gate.Gate(wrap(llama), wrap(llama), inputs, lambda decoder: nullcontext()).cached()
    assert not check.passed
    assert check.measured > 0.1


def test_experts_that_rounding_chooses_are_no_fault_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the intact model fails the check as well; in float32 a wrong cache still does."""
    model = make_zoo("aria_text").bfloat16()
    (cached, *_) = verify_intact(model).checks
    assert cached.passed
    assert cached.detail.startswith("cached decoding against the uncached forward, in float32 (0.")
    assert cached.limit == CACHE_LIMIT[torch.float32]
    pruned = remove_layers(model, [1])
    assert verify_removal(model, pruned, [1]).passed
    wrong_layer_idx(pruned)
    assert "cached decoding" in verify_removal(model, pruned, [1]).failure()
    monkeypatch.setattr(gate, "free_memory", lambda device: 0)
    (cached, *_) = verify_intact(model).checks
    assert not cached.passed
    assert cached.detail.endswith(f"(the intact model deviates by {cached.measured:.2g})")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["diffllama", "gpt2-inverse-layer"])
def test_numbers_that_a_family_computes_anew_are_rounded(family: str, dtype: torch.dtype) -> None:
    model = make_zoo(family).to(dtype)
    for removed in ([0], [3], [2, 5]):
        pruned = remove_layers(model, removed)
        report = verify_removal(model, pruned, removed)
        assert report.passed, f"\n{report}"
    with torch.no_grad():
        find_structure(pruned).layers[3].mlp.get_submodule("c_proj" if "gpt2" in family else "down_proj").weight.mul_(2)
    assert "same as skipping" in verify_removal(model, pruned, removed).failure()
