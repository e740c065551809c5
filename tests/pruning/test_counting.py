"""What leaves is counted by one rule: of a model in memory, of its files, and as the cut really does it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from families.zoo import LAYERS, make_zoo
from helpers import make_tiny, operated
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.counting import count_check, held_by, leaving, shares_leaving, sizes_in_memory
from lyapunov_prune.pruning.edit import edit_of
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import remove_layers, verify_removal

# Plain; embeddings tied to the head; tables with a block a layer; blocks that layers share; a scale of the first layer.
CASES = {
    "plain": ("llama", [2, 5]),
    "tied": ("gemma2", [2, 5]),
    "tables, Gemma 3n": ("gemma3n_text", [3]),
    "tables, Gemma 4": ("gemma4_text", [0, 3]),
    "shared blocks, Zamba": ("zamba", [2, 5]),
    "shared blocks and their adapters, Zamba 2": ("zamba2", [3]),
    "Zaya's first layer": ("zaya", [0, 1]),
    "Zaya's others": ("zaya", [3]),
}


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in CASES), ("tables, Gemma 4", torch.bfloat16)]
)
def test_memory_and_files_give_the_same_and_the_cut_does_it(
    case: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    name, remove = CASES[case]
    model = make_zoo(name).to(dtype)
    plan = PruningPlan.given(model, remove)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    outline = read_outline(tmp_path, name)
    assert outline.model.device.type == "meta"
    edit, on_files = edit_of(wrap(model), plan), edit_of(outline.decoder, plan)
    shares = shares_leaving(wrap(model), edit)
    assert shares_leaving(outline.decoder, on_files) == shares
    sizes = sizes_in_memory(model)
    parameters, size = held_by(model, sizes, shares)
    assert held_by(outline.model, outline.sizes(), shares) == (parameters, size)
    pruned = operated(model, plan)
    left = sum(size for _, size in sizes_in_memory(pruned))
    assert (parameters, size) == (
        model.num_parameters() - pruned.num_parameters(),
        sum(size for _, size in sizes) - left,
    )
    assert count_check(leaving(wrap(model), edit), wrap(pruned), left).passed
    both = leaving(outline.decoder, on_files, outline.sizes()), leaving(wrap(model), edit)
    on_disk, in_memory = ((goes.before, goes.gone, goes.after) for goes in both)
    assert on_disk == in_memory


def share(model: PreTrainedModel, remove: list[int]) -> dict[str, Fraction]:
    return shares_leaving(wrap(model), edit_of(wrap(model), PruningPlan.given(model, remove)))


def test_a_table_leaves_by_its_blocks() -> None:
    shares = share(make_zoo("gemma4_text"), [0, 3])
    blocks = {name: part for name, part in shares.items() if part not in (0, 1)}
    assert {name.split(".")[-2] for name in blocks} == {"embed_tokens_per_layer", "per_layer_model_projection"}
    assert set(blocks.values()) == {Fraction(2, LAYERS)}


def test_what_a_kept_layer_uses_stays_under_every_name() -> None:
    model = make_tiny("llama")
    up = [layer.mlp.up_proj for layer in find_structure(model).layers]  # type: ignore[union-attr]
    up[1].weight = up[2].weight = up[4].weight
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (1, 2, 4)]
    assert [share(model, [1, 2])[name] for name in names] == [0, 0, 0]
    assert [share(model, [1, 2, 4])[name] for name in names] == [1, 1, 1]
    layer = sum(p.numel() for p in find_structure(model).layers[0].parameters())
    once = 3 * layer - 2 * up[1].weight.numel()
    assert held_by(model, sizes_in_memory(model), share(model, [1, 2, 4])) == (once, 4 * once)


def test_one_parameter_too_many_is_seen(llama: PreTrainedModel) -> None:
    plan = PruningPlan.given(llama, [1])
    pruned, goes = operated(llama, plan), leaving(wrap(llama), edit_of(wrap(llama), plan))
    left = sum(size for _, size in sizes_in_memory(pruned))

    def check(saved: int) -> GateCheck:
        return count_check(goes, wrap(pruned), saved)

    assert check(left).passed
    assert check(left + 4).detail.startswith(f"bytes saved: {left + 4:,}, not ")
    pruned.register_parameter("stray", torch.nn.Parameter(torch.zeros(1)))
    assert check(left).detail.startswith("parameters: ")


def test_every_tensor_of_the_files_is_counted(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(1)}, file, {"format": "pt"})
    model = load(checkpoint).model
    check = verify_removal(model, remove_layers(model, [1]), [1]).checks[-1]
    assert check.passed
    assert "of 58 tensors in the files 48 kept, 9 removed, 1 left out by name" in check.detail


@pytest.mark.parametrize(
    ("name", "remove"),
    [
        *(("zamba2", remove) for remove in ([2, 3], [1, 5], [6])),
        ("zamba", [2, 3]),
        ("zamba2-two-blocks", [1, 5]),
        ("zaya", [1, 5]),
        ("zaya", [6]),
    ],
)
def test_tensors_whose_numbers_change_with_the_layers_of_others_are_kept(
    name: str, remove: list[int], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The block that layers share has the name of one of them in the files, and Zamba 2 numbers adapters by layer."""
    make_zoo(name).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path).model
    assert verify_removal(model, remove_layers(model, remove), remove).passed


def test_planted_fault_a_tensor_of_the_files_that_is_nowhere_is_named(checkpoint: Path) -> None:
    model: Any = load(checkpoint).model
    plan = PruningPlan.given(model, [1])
    pruned: Any = remove_layers(model, plan)
    norm = pruned.model.layers[3].input_layernorm
    norm.register_parameter("gain", norm._parameters.pop("weight"))  # as many numbers, by another name
    saved = sum(size for _, size in sizes_in_memory(pruned))
    check = count_check(leaving(wrap(model), edit_of(wrap(model), plan)), wrap(pruned), saved)
    assert not check.passed
    assert "model.layers.4.input_layernorm.weight of the input is neither kept nor removed" in check.detail


def test_a_model_that_was_changed_after_loading_is_counted_by_what_it_is(checkpoint: Path) -> None:
    smaller = remove_layers(load(checkpoint).model, [1])
    assert verify_removal(smaller, remove_layers(smaller, [0]), [0]).passed
