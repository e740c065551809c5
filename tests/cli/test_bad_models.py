"""A bad model is one line and exit code 2, from every command that takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import BROKEN, COMMANDS, TEXT, Done, bert, write_gguf
from safetensors.torch import load_file, save_file
from transformers import BertLMHeadModel, PreTrainedModel

# Bad models: every command that takes one says so.


def nan_in_layer_3(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("fault", ["truncated", "corrupt", "pickle only", "missing shard", "missing key", "no config"])
def test_a_broken_checkpoint(fault: str, command: list[str], run_bad: Callable[..., str], checkpoint: Path) -> None:
    BROKEN[fault][0](checkpoint)
    assert "tiny" in run_bad(*command)


def test_an_encoder(command: list[str], run_bad: Callable[..., str], checkpoint: Path) -> None:
    BertLMHeadModel(bert()).save_pretrained(checkpoint)
    assert "an encoder" in run_bad(*command)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_truncated_gguf_file(
    share: float,
    command: list[str],
    run_bad: Callable[..., str],
    reader: PreTrainedModel,
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
    path = write_gguf(reader, checkpoint.parent / "x.gguf")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert "x.gguf" in run_bad(*(a.replace("tiny", "x.gguf") for a in command))


@pytest.mark.parametrize("model", ["./absent", "a/b/c", "absent.gguf"])
def test_an_unknown_model(model: str, command: list[str], run_bad: Callable[..., str]) -> None:
    assert "; " in run_bad(*(a.replace("tiny", model) for a in command))


def test_a_hub_model_offline(
    command: list[str], run_bad: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    command = [a.replace("tiny", "some-org/some-model-that-nobody-has") for a in command]
    assert "HF_HUB_OFFLINE" in run_bad(*command)


@pytest.mark.parametrize("command", ["profile", "rank", "prune"], indirect=True)
def test_nan_activations_are_named_by_layer(command: list[str], run_bad: Callable[..., str], checkpoint: Path) -> None:
    nan_in_layer_3(checkpoint)
    assert "output of layer 3" in run_bad(*command)


def test_nan_activations_have_no_perplexity(run_bad: Callable[..., str], checkpoint: Path) -> None:
    nan_in_layer_3(checkpoint)
    assert "output of layer 3" in run_bad(*COMMANDS["eval"])


@pytest.mark.parametrize("command", ["rank", "prune"])
@pytest.mark.parametrize("criterion", ["rho", "blend"])
def test_rho_of_nothing_but_rounding_decides_nothing(
    command: str, criterion: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    asked = [command, "tiny", "--criterion", criterion, "--remove", "1", "-o", "out", *TEXT]
    assert "rounding floor of bfloat16" in run_bad(*asked, "--dtype", "bfloat16")
    assert run(*asked).code == 0
