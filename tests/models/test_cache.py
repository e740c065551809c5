"""A GGUF file is dequantised once; what comes from the cache is what it holds, and a cache that fails harms nobody."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import VOCABULARY, disk_full, make_tiny, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models import cache as cache_module
from lyapunov_prune.models import gguf
from lyapunov_prune.models.cache import builtin_place, cache_folder, cached, clear_cache
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.gguf_settings import shortest
from lyapunov_prune.models.loading import load


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/gguf"


@pytest.fixture
def file(reader: PreTrainedModel, tmp_path: Path) -> Path:
    return write_gguf(reader, tmp_path / "x.gguf", packed=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were dequantised, one after the other."""
    files: list[Path] = []
    dequantise = gguf._dequantise

    def noted(path: Path) -> Decoder:
        files.append(path)
        return dequantise(path)

    monkeypatch.setattr(gguf, "_dequantise", noted)
    return files


def same(a: Decoder, b: Decoder) -> bool:
    """Bit by bit: weights and buffers, configs, tokenizers."""
    mine, theirs = ({**each.model.state_dict(), **dict(each.model.named_buffers())} for each in (a, b))
    configs = [
        (each.model.config.to_dict(), each.model.generation_config.to_dict(), each.tokenizer.init_kwargs)
        for each in (a, b)
    ]
    backends = [each.tokenizer.backend_tokenizer.to_str() for each in (a, b)]  # type: ignore[attr-defined]
    for each in configs:
        each[2].pop("name_or_path", None)
    return (
        mine.keys() == theirs.keys()
        and all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine)
        and configs[0] == configs[1]
        and type(a.tokenizer) is type(b.tokenizer)
        and backends[0] == backends[1]
    )


def entry(place: Path) -> Path:
    (found,) = (each.folder for each in cached())
    assert found.parent == place
    return found


# What comes from the cache.


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16", "float64"])
def test_what_is_cached_is_what_the_file_holds(dtype: str | None, file: Path, made: list[Path]) -> None:
    """The numbers of the file in float32, rounded once; config and tokenizer as transformers reads them there."""
    first, second = load(file, dtype=dtype), load(file, dtype=dtype)
    assert made == [file]
    assert same(first, second)
    assert second.model.dtype == getattr(torch, dtype or "float32")
    source: dict[str, Any] = {"gguf_file": str(file)}
    plain = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    wanted = plain.state_dict()
    assert second.model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(t, wanted[name].to(t.dtype)) for name, t in second.model.state_dict().items())
    mine, theirs = (m.config.to_dict() for m in (second.model, plain))
    said = {"dtype", "_name_or_path", "quantization_config", "architectures"}  # how it was saved
    theirs["rms_norm_eps"] = shortest(theirs["rms_norm_eps"])  # which the file holds in float32
    assert {k: v for k, v in mine.items() if k not in said} == {k: v for k, v in theirs.items() if k not in said}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    assert second.tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
    assert second.tokenizer.special_tokens_map == tokenizer.special_tokens_map


def test_one_dtype_serves_all(file: Path, made: list[Path]) -> None:
    for dtype in ("bfloat16", "float32", None):
        load(file, dtype=dtype)
    assert made == [file]


def test_a_file_is_known_by_its_content(file: Path, made: list[Path], tmp_path: Path) -> None:
    first = load(file)
    moved = file.rename(tmp_path / "y.gguf")
    loaded = load(moved)
    assert made == [file]
    assert loaded.model.config._name_or_path == str(moved)
    first.model.config._name_or_path = str(moved)
    assert same(first, loaded)
    other = make_tiny("llama", seed=1, vocab_size=len(VOCABULARY))
    write_gguf(other, moved)  # in the same place, of the same name
    assert torch.equal(load(moved).model.model.norm.weight, other.model.norm.weight)
    assert not same(load(moved), loaded)
    assert made == [file, moved]
    assert len(cached()) == 2


def test_another_version_of_what_reads_it_makes_it_anew(
    file: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(file)
    monkeypatch.setattr(cache_module, "version", lambda name: "99.0.dev1")
    load(file)
    assert made == [file, file]


def test_what_lies_beside_the_file_is_not_read(
    file: Path, tiny: Callable[..., PreTrainedModel], checkpoint: Path
) -> None:
    alone = load(file)
    clear_cache()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        text = (checkpoint / name).read_text().replace("</s>", "<end>")
        (file.parent / name).write_text(text)
    assert same(alone, load(file))


# A cache that is damaged.


def rewrite(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Another file in its place: a loaded model lies in the memory of the old one."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(change(content))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit": lambda folder: rewrite(folder, lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]),
    "cut": lambda folder: rewrite(folder, lambda content: content[:1000]),
    "empty": lambda folder: rewrite(folder, lambda content: b""),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "another config": lambda folder: (folder / "config.json").write_text("{"),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a file more": lambda folder: (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}'),
    "no seal": lambda folder: (folder / "cached.json").unlink(),
    "a broken seal": lambda folder: (folder / "cached.json").write_text("{"),
    "a list as seal": lambda folder: (folder / "cached.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_anew(damage: str, file: Path, made: list[Path], place: Path) -> None:
    first = load(file)
    DAMAGES[damage](entry(place))
    assert same(load(file), first)
    assert made == [file, file]
    assert same(load(file), first)
    assert made == [file, file]


def test_what_a_killed_process_left_is_removed(file: Path, place: Path) -> None:
    load(file)
    whole = entry(place)
    half = place / f".{whole.name}.partial-{'0' * 16}"
    half.with_name(f"{half.name}.lock").touch()  # as a killed process leaves it
    whole.rename(half)
    load(file)
    assert entry(place) == whole
    assert not half.exists()


def test_an_entry_that_goes_while_it_is_read_is_made_anew(
    file: Path, made: list[Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(file)
    read = gguf.load_folder

    entries = [entry(place)]

    def emptied(folder: Path, options: dict[str, Any]) -> Decoder:
        if entries:
            shutil.rmtree(entries.pop())
        return read(folder, options)

    monkeypatch.setattr(gguf, "load_folder", emptied)
    assert same(load(file), first)
    assert made == [file, file]


def _load_and_note(file: Path, notes: Path) -> None:
    dequantise = gguf._dequantise

    def slowly(path: Path) -> Decoder:
        with notes.open("a") as note:
            note.write("made\n")
        time.sleep(0.5)
        return dequantise(path)

    gguf._dequantise = slowly
    load(file)


def test_two_processes_make_one_entry(file: Path, tmp_path: Path, place: Path) -> None:
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=_load_and_note, args=(file, tmp_path / "notes")) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "notes").read_text() == "made\n"
    assert list(place.iterdir()) == [entry(place)]  # and no lock file beside it


# A cache that cannot be written.


def test_without_a_cache_it_works_and_says_so(
    file: Path, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = load(file, dtype="bfloat16")
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(file))  # no folder
    capsys.readouterr()
    assert same(load(file, dtype="bfloat16"), first)
    assert made == [file, file]
    told = capsys.readouterr().err
    assert told.startswith("warning: cannot write in ")
    assert "x.gguf will be dequantised again next time, or name another folder in LYAPUNOV_PRUNE_CACHE" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_the_built_in_model_needs_the_cache_and_a_cache_is_a_folder(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "taken" / below))
    with pytest.raises(LyapunovPruneError, match=r"taken.*LYAPUNOV_PRUNE_CACHE"):
        load("smollm2-135m")
    with pytest.raises(LyapunovPruneError, match=r"taken is not a folder.*LYAPUNOV_PRUNE_CACHE"):
        cached()


def test_a_full_disk_is_a_warning_too(
    file: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_module, "_seal", disk_full)
    assert load(file).model.dtype == torch.float32
    assert "No space left on device" in capsys.readouterr().err
    assert cached() == []
    assert not [path for path in place.iterdir() if path.is_dir()]


def test_without_any_place_it_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "TemporaryDirectory", disk_full)
    with pytest.raises(LyapunovPruneError, match=r"No space left.*LYAPUNOV_PRUNE_CAC"):
        load(file)


def test_a_cache_that_may_only_be_read_is_read(file: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load(file)
    monkeypatch.setattr(os, "utime", disk_full)
    load(file)
    assert made == [file]


def test_a_file_that_cannot_be_read_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_sha256", disk_full)
    with pytest.raises(LyapunovPruneError, match=r"x\.gguf.*permissions"):
        load(file)


# Its size.


def test_the_oldest_used_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., PreTrainedModel]
) -> None:
    files = [
        write_gguf(tiny("llama", seed=seed, vocab_size=len(VOCABULARY)), tmp_path / f"{seed}.gguf") for seed in range(3)
    ]
    for number, file in enumerate(files[:2]):
        load(file)
        (newest,) = (each for each in cached() if each.source == file.name)
        os.utime(newest.folder / "cached.json", (number, number))
    load(files[0])  # now the second is the oldest
    size = cached()[0].size
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE_GB", str(2.5 * size / 1e9))
    load(files[2])
    assert [each.source for each in cached()] == ["2.gguf", "0.gguf"]
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE_GB", "0")
    load(files[1])
    assert [each.source for each in cached()] == ["1.gguf"]


@pytest.mark.parametrize("limit", ["much", "-1", "nan", "inf", "1e308", "20 GB"])
def test_a_limit_that_is_none_is_refused(limit: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE_GB", limit)
    with pytest.raises(LyapunovPruneError, match=f"LYAPUNOV_PRUNE_CACHE_GB is '{limit}'"):
        load(file)


# What is shown and emptied.


def test_what_is_in_the_cache_is_told(file: Path, place: Path) -> None:
    assert cached() == []
    load(file)
    (one,) = cached()
    assert one.source == "x.gguf"
    assert one.size == sum(path.stat().st_size for path in entry(place).iterdir())


def test_only_the_cache_s_own_is_deleted(file: Path, checkpoint: Path, place: Path) -> None:
    load(file)
    builtin = builtin_place()
    checkpoint.rename(builtin)
    assert {each.source for each in cached()} == {"x.gguf", "smollm2-135m"}
    name = next(path.name for path in place.iterdir() if path.is_dir())
    for left in (place / f".{name}.partial-{'0' * 16}", cache_folder() / f".{builtin.name}.partial-{'0' * 16}"):
        left.mkdir()
        left.with_name(f"{left.name}.lock").touch()  # as a killed process leaves it
    others = [
        *("gguf/notes", "gguf/.a.partial-0", f"gguf/.{name}.partial-kept", "gguf/0a-1-2", f"gguf/{name}-of-mine"),
        *("other", f".{builtin.name}.partial-kept", f".smollm2-135m-base.partial-{'0' * 16}"),
    ]
    files = [
        *("gguf/poetry.lock", "gguf/.a.partial-0.lock", f"gguf/{name}-of-mine.lock", "gguf/.b.partial-0.lock"),
        *("poetry.lock", f".{builtin.name}.partial-kept.lock"),
    ]
    for path in others:
        (cache_folder() / path).mkdir()
    for path in files:
        (cache_folder() / path).touch()
    clear_cache()
    assert cached() == []
    left_over = {path.relative_to(cache_folder()).as_posix() for path in cache_folder().rglob("*")}
    assert left_over == {"gguf", *others, *files}
    shutil.rmtree(place)
    clear_cache()
    assert not place.exists()


def test_a_link_goes_and_what_it_points_to_stays(file: Path, place: Path, checkpoint: Path, tmp_path: Path) -> None:
    load(file)
    elsewhere = tmp_path / "elsewhere"
    whole = entry(place)
    whole.rename(elsewhere)
    whole.symlink_to(elsewhere)
    builtin = builtin_place()
    builtin.symlink_to(checkpoint)
    assert [each.size for each in cached()] == [0, 0]
    before = {path: path.read_bytes() for folder in (elsewhere, checkpoint) for path in folder.iterdir()}
    clear_cache()
    assert cached() == []
    assert not whole.is_symlink()
    assert not builtin.is_symlink()
    assert before == {path: path.read_bytes() for folder in (elsewhere, checkpoint) for path in folder.iterdir()}


def test_a_damaged_entry_behind_a_link_is_made_anew(file: Path, made: list[Path], place: Path, tmp_path: Path) -> None:
    first = load(file)
    whole = entry(place)
    whole.rename(tmp_path / "elsewhere")
    whole.symlink_to(tmp_path / "elsewhere")
    (whole / "cached.json").write_text("{")
    assert same(load(file), first)
    assert not whole.is_symlink()
    assert same(load(file), first)
    assert made == [file, file]


def test_a_disk_that_refuses_is_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(file)
    monkeypatch.setattr(shutil, "rmtree", disk_full)
    with pytest.raises(LyapunovPruneError, match=r"empty .*No space left"):
        clear_cache()


def test_the_folder_is_where_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder().name == "cache"
    monkeypatch.delenv("LYAPUNOV_PRUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/lyapunov-prune")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/lyapunov-prune"
