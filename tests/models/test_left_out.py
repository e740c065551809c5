"""What the files of a checkpoint hold and the loaded model does not: told apart, named, refused where it is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TEXT, WRITERS, Done, make_tiny, writer_id
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.left_out import find_left_out, left_out, require_whole, without_heads
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.structure import find_layers
from lyapunov_prune.pruning.removal import remove_layers

L = 6
KINDS = {
    f"model.layers.{L}.eh_proj.weight": "heads",  # the config counts one
    f"model.layers.{L + 1}.eh_proj.weight": "strays",
    "mtp.fc.weight": "heads",
    "model.mtp_layers.0.norm.weight": "heads",
    "model.visual.blocks.0.attn.qkv.weight": "parts",
    "score.weight": "parts",
    "model.layers.1.self_attn.q_proj.bias": "strays",
    "model.layers.1.self_attn.rotary_emb.inv_freq": "tables",
}


def add_tensors(folder: Path, *names: str, **settings: Any) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(2, 2) for name in names}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def test_every_tensor_of_the_files_is_taken_or_left_out_by_kind(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(load_file(checkpoint / "model.safetensors"))
    add_tensors(checkpoint, *KINDS, num_nextn_predict_layers=1)
    left = left_out(load(checkpoint).model)
    assert left is not None
    assert {name: kind for kind in ("heads", "parts", "strays", "tables") for name in getattr(left, kind)} == KINDS
    assert len(left.taken) == before
    assert len(left.names) == len(KINDS)
    told = capsys.readouterr().err
    assert told.count("\n") == 3  # of tables nothing is said
    assert "2 tensors (1 of model.visual, 1 of score)" in told
    assert "3 tensors (" in told
    assert all(f"1 of {group}" in told for group in (f"model.layers.{L}", "mtp", "model.mtp_layers"))


def test_a_whole_checkpoint_leaves_nothing_out(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = left_out(load(checkpoint).model)
    assert left is not None
    assert (left.names, left.lines(), capsys.readouterr().err) == ((), [], "")


def test_layers_behind_the_last_are_heads_only_if_the_config_counts_them(llama: PreTrainedModel) -> None:
    name = f"model.layers.{L}.eh_proj.weight"
    assert find_left_out(llama, find_layers(llama), {}, {name: name}).strays == (name,)


@pytest.mark.parametrize(
    "arguments",
    [
        ["prune", "tiny", "--layers", "1", *TEXT],
        ["prune", "tiny", "--layers", "1", "--device", "disk"],
        ["compress", "tiny", "--method", "magnitude", "--sparsity", "0.5"],
        ["compress", "tiny", "--method", "magnitude", "--sparsity", "0.5", "--device", "disk"],
        ["heal", "tiny", "--teacher", "tiny", "--steps", "1", *TEXT],
        ["joint", "tiny", "--remove", "1", "--tokens", "512", "--context", "16"],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + [a for a in arguments if a in ("disk", "compact")]),
)
def test_a_part_that_would_be_lost_is_refused_by_name_until_asked(
    arguments: list[str], checkpoint: Path, run: Callable[..., Done]
) -> None:
    add_tensors(checkpoint, "model.visual.blocks.0.attn.qkv.weight")
    done = run(*arguments, "-o", "out")
    assert (done.code, {path for path in done.changed if "out" in str(path)}) == (2, set()), done
    assert "1 tensor (1 of model.visual)" in done.err.splitlines()[-1]
    assert "--text-only" in done.err.splitlines()[-1]


def test_asked_it_is_left_out_and_the_card_says_so(checkpoint: Path, run: Callable[..., Done]) -> None:
    add_tensors(checkpoint, "model.visual.blocks.0.attn.qkv.weight")
    done = run("export", "tiny", "--text-only", "-o", "text")
    assert done.code == 0, done
    assert "1 tensor (1 of model.visual), left out" in done.err
    assert "## Left out\n\n- 1 tensor (1 of model.visual), left out" in Path("text", "README.md").read_text()
    assert run("prune", "text", "--layers", "1", "-o", "out", *TEXT).code == 0


def test_a_model_that_was_not_loaded_from_files_lacks_nothing(llama: PreTrainedModel) -> None:
    assert left_out(llama) is None
    require_whole(llama)


HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V3, GLM-4": ({"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 0}),
    "Qwen 3.5": (
        {"text_config": {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}},
        {"text_config": {"mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": False}},
    ),
    "MiniMax-M2": (
        {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1},
        {"use_mtp": False, "num_mtp_modules": 0, "mtp_transformer_layers": 0},
    ),
    "Inkling": (
        {"mtp_config": {"num_nextn_predict_layers": 2, "num_hidden_layers": 2, "local_layer_ids": [1]}},
        {"mtp_config": {"num_nextn_predict_layers": 0, "num_hidden_layers": 0, "local_layer_ids": [1]}},
    ),
    "what counts no weights": (
        {"mtp_loss_scaling_factor": 0.1, "mtp_hidden_states_first": True, "num_hidden_layers": 4, "n_head": 2},
        {"mtp_loss_scaling_factor": 0.1, "mtp_hidden_states_first": True, "num_hidden_layers": 4, "n_head": 2},
    ),
}


@pytest.mark.parametrize("family", HEADS)
def test_a_config_counts_no_heads(family: str) -> None:
    before, after = HEADS[family]
    assert without_heads(before) == after


def test_a_model_that_lost_layers_in_python_counts_none_either() -> None:
    model = make_tiny("llama", num_nextn_predict_layers=1)
    pruned: Any = remove_layers(model, [1])
    assert (pruned.config.num_nextn_predict_layers, model.config.num_nextn_predict_layers) == (0, 1)


@pytest.mark.usefixtures("healing_kept")
@pytest.mark.parametrize("arguments", WRITERS, ids=writer_id)
def test_no_config_that_is_written_names_heads_that_are_not_there(
    arguments: list[str], checkpoint: Path, run: Callable[..., Done]
) -> None:
    add_tensors(checkpoint, f"model.layers.{L}.eh_proj.weight", "mtp.fc.weight", num_nextn_predict_layers=1)
    done = run(*arguments, "-o", "out")
    assert done.code == 0, done
    assert f"2 tensors (1 of model.layers.{L}, 1 of mtp), left out: prediction heads" in done.err
    assert json.loads(Path("out", "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not any("mtp" in name or "eh_proj" in name for name in _tensors(Path("out")))
    assert "prediction heads" in Path("out", "README.md").read_text()


def test_a_count_is_mended_where_the_files_hold_no_head_either(checkpoint: Path, run: Callable[..., Done]) -> None:
    add_tensors(checkpoint, num_nextn_predict_layers=1)
    done = run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT)
    assert (done.code, "left out" in done.err) == (0, False)
    assert json.loads(Path("out", "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_weights_that_a_layer_has_no_place_for_are_named_and_pruned_around(
    checkpoint: Path, run: Callable[..., Done]
) -> None:
    add_tensors(checkpoint, "model.layers.1.self_attn.q_proj.bias")
    done = run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT)
    assert done.code == 0, done
    assert "1 tensor (1 of model.layers.1), left out: the config names no such weights" in done.err


def _tensors(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


def test_a_refusal_is_one_line(checkpoint: Path) -> None:
    add_tensors(checkpoint, "score.weight")
    with pytest.raises(LyapunovPruneError, match="no place") as error:
        require_whole(load(checkpoint).model)
    assert "\n" not in str(error.value)
