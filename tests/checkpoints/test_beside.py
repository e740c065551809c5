"""What lies beside the weights travels with them, or is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import TEXT, WRITERS, Done, writer_id
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.checkpoints.beside import save_files
from lyapunov_prune.models.loading import load

SETTINGS = [
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer.model",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "LICENSE",
    "NOTICE.txt",
]
UNKNOWN = ["optimizer.pt", "modeling_own.py", "2_Dense/pytorch_model.bin", "onnx"]
SILENT = ["README.md", ".gitattributes", "training.png"]
MODULES = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "../outside"}, {"path": "/etc"}]


@pytest.fixture
def full(checkpoint: Path) -> Path:
    """`checkpoint` with everything that can lie beside weights."""
    for name in (*SETTINGS, *UNKNOWN, *SILENT):
        place = checkpoint / name
        place.parent.mkdir(exist_ok=True)
        if name == "onnx":
            place.mkdir()
        else:
            place.write_text(f'{{"of": "{name}"}}')
    (checkpoint / "modules.json").write_text(json.dumps(MODULES))
    (checkpoint.parent / "outside").mkdir()
    (checkpoint.parent / "outside" / "config.json").write_text("{}")
    return checkpoint


def others(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("healing_kept")
@pytest.mark.parametrize("arguments", WRITERS, ids=writer_id)
def test_every_way_of_writing_takes_them_along(arguments: list[str], full: Path, run: Callable[..., Done]) -> None:
    done = run(*arguments, "-o", "out")
    assert done.code == 0, done
    for name in SETTINGS:
        assert Path("out", name).read_bytes() == (full / name).read_bytes(), name
    assert not others(Path("out")) & {*UNKNOWN, *SILENT[1:], "outside/config.json"}
    (line,) = [line for line in done.err.splitlines() if "left behind" in line]
    assert all(name in line for name in UNKNOWN)
    assert not any(name in line for name in (*SETTINGS, *SILENT))
    load("out")


def test_of_a_plain_checkpoint_nothing_is_said(checkpoint: Path, run: Callable[..., Done]) -> None:
    first = run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT)
    again = run("prune", "out", "--layers", "1", "-o", "smaller", *TEXT)  # beside results of this program
    assert (first.code, again.code) == (0, 0)
    assert "left behind" not in first.err + again.err


def test_a_link_out_of_the_folder_is_not_followed(
    checkpoint: Path, reader: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("mine")
    os.symlink(tmp_path / "secret", checkpoint / "LICENSE")
    loaded = load(checkpoint)
    (tmp_path / "out").mkdir()
    save_files(loaded.model, loaded.tokenizer, tmp_path / "out")
    assert "LICENSE" not in others(tmp_path / "out")
    assert "left behind" in capsys.readouterr().err


def test_files_of_the_hub_s_cache_are_links_to_its_blobs(checkpoint: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / "0"
    blobs = tmp_path / "models--org--model" / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    checkpoint.rename(snapshot)
    (blobs / "1").write_text("of the hub")
    os.symlink("../../blobs/1", snapshot / "tokenizer.model")
    loaded = load(snapshot)
    (tmp_path / "out").mkdir()
    save_files(loaded.model, loaded.tokenizer, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_text() == "of the hub"


def test_another_tokenizer_keeps_its_own_files(
    checkpoint: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (checkpoint / "tokenizer.model").write_text("of the checkpoint")
    (tmp_path / "out").mkdir()
    save_files(load(checkpoint).model, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.model").exists()


def test_a_model_from_nowhere_has_nothing_beside_it(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_files(reader, tokenizer, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "[[1]]", "[" * 10**5])
def test_a_broken_list_of_modules_names_none(content: str, full: Path, tmp_path: Path) -> None:
    (full / "modules.json").write_text(content)
    loaded = load(full)
    (tmp_path / "out").mkdir()
    save_files(loaded.model, loaded.tokenizer, tmp_path / "out")
    assert not any("Pooling" in name for name in others(tmp_path / "out"))
