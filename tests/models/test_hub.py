"""The hub, as a function put in the place of the download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from helpers import BROKEN, equal
from huggingface_hub import errors

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.loading import load


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | Exception], list[tuple[str, dict[str, Any]]]]:
    """`hub(answer)` makes every download return a folder or raise, and lists what was asked for."""

    def answer_with(answer: Path | Exception) -> list[tuple[str, dict[str, Any]]]:
        asked: list[tuple[str, dict[str, Any]]] = []

        def snapshot_download(name: str, **options: Any) -> str:
            asked.append((name, options))
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return answer_with


Hub = Callable[[Path | Exception], list[tuple[str, dict[str, Any]]]]


def http_error(kind: type[errors.HfHubHTTPError], message: str) -> errors.HfHubHTTPError:
    response: Any = SimpleNamespace(headers={}, status_code=404, request=None, url="")
    return kind(message, response=response)


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_model_is_downloaded_and_loaded(offline: bool, hub: Hub, checkpoint: Path, reader: Any) -> None:
    asked = hub(checkpoint)
    loaded = load("org/model", offline=offline)
    assert equal(loaded.model, reader)
    assert loaded.model.config._name_or_path == "org/model"
    ((name, options),) = asked
    assert name == "org/model"
    assert options["local_files_only"] is offline


@pytest.mark.parametrize("file", ["pytorch_model.bin", "modeling.py", "x.pt", "onnx/model.safetensors", "x.pkl"])
def test_neither_code_nor_pickles_are_downloaded(file: str, hub: Hub, checkpoint: Path) -> None:
    asked = hub(checkpoint)
    load("org/model")
    options = asked[0][1]
    patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "merges.txt"]
    assert list(huggingface_hub.utils.filter_repo_objects([file, *wanted], **patterns)) == wanted


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("not cached"), "could not be reached"),
        (http_error(errors.RepositoryNotFoundError, "404"), "no model org/model"),
        (http_error(errors.GatedRepoError, "403"), "may read"),
        (http_error(errors.HfHubHTTPError, "503 busy\nmore"), "org/model: 503 busy"),
        (OSError("No space left on device"), "org/model: No space left"),
        (RuntimeError(), "org/model: RuntimeError"),
    ],
    ids=["unreachable", "unknown", "gated", "server", "disk", "other"],
)
def test_a_hub_that_fails_is_one_line(error: Exception, message: str, hub: Hub) -> None:
    hub(error)
    with pytest.raises(LyapunovPruneError, match=message) as caught:
        load("org/model")
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_there_offline_says_so(hub: Hub) -> None:
    asked = hub(errors.LocalEntryNotFoundError("not cached"))
    with pytest.raises(LyapunovPruneError, match="offline was given"):
        load("org/model", offline=True)
    assert asked[0][1]["local_files_only"] is True


@pytest.mark.parametrize("fault", ["pickle only", "truncated", "no config"])
def test_a_broken_download_is_refused(fault: str, hub: Hub, checkpoint: Path) -> None:
    spoil, message = BROKEN[fault]
    spoil(checkpoint)
    hub(checkpoint)
    with pytest.raises(LyapunovPruneError, match=message):
        load("org/model")


def test_a_slip_in_the_name_of_a_local_folder_is_seen(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smaller").mkdir()
    for error in (errors.LocalEntryNotFoundError("none"), http_error(errors.RepositoryNotFoundError, "404")):
        hub(error)
        with pytest.raises(LyapunovPruneError, match=r"did you mean smaller\?"):
            load("smaler")


def test_a_local_folder_asks_no_hub(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(RuntimeError("asked"))
    monkeypatch.chdir(checkpoint.parent)
    load(checkpoint.name)
    assert asked == []


def test_the_parts_of_an_embedding_model_are_fetched_too(hub: Hub, checkpoint: Path) -> None:
    (checkpoint / "modules.json").write_text('[{"path": "1_Pooling"}]')
    asked = hub(checkpoint)
    load("org/model", offline=True)
    patterns = asked[1][1]
    assert patterns["local_files_only"] is True
    files = ["1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "onnx/config.json"]
    wanted = huggingface_hub.utils.filter_repo_objects(files, allow_patterns=patterns["allow_patterns"])
    assert list(wanted) == files[:2]


@pytest.mark.parametrize("name", ["smolm2-135m", "SmolLM2-135M", "smollm2-135"])
def test_a_slip_in_the_name_of_the_built_in_model_asks_no_hub(name: str, hub: Hub) -> None:
    asked = hub(AssertionError("the hub was asked"))
    with pytest.raises(LyapunovPruneError, match="did you mean smollm2-135m"):
        load(name)
    assert asked == []
