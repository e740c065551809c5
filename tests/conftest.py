"""Tiny random decoders of every listed family, and the real built-in model."""

from __future__ import annotations

import functools
import gc
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import typer
from helpers import COMMANDS, KINDS, VOCABULARY, Done, make_tiny, make_tokenizer, tree
from helpers.forked import FORKED
from hypothesis import HealthCheck, settings
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import progress
from lyapunov_prune.checkpoints import reloading
from lyapunov_prune.cli.app import main
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.text import load_text
from lyapunov_prune.healing import training
from lyapunov_prune.healing.report import Healing
from lyapunov_prune.models import from_folder
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.loading import load

# Two test processes on two cores: more threads would spend their time waiting for each other.
torch.set_num_threads(1)
# No test is timed: a busy machine fails none. The rest is what Hypothesis chose, on CI another set than elsewhere.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# Modules and collected tests stay: Python would look for garbage among their many objects again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5000, 20, 50)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest-xdist up to 3.8 loses its groups without a word under pytest 9.2 (pytest-xdist issue 1386)."""
    grouped = item.config.getoption("loadgroup", False) and item.get_closest_marker("xdist_group")
    if grouped and "@" not in item.nodeid:
        pytest.fail("this pytest makes every process set up what a group shares; run make install", pytrace=False)


@pytest.fixture
def healing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Healing keeps its last round, whatever that is worth: random models on random text gain nothing."""
    monkeypatch.setattr(Healing, "kept", property(lambda self: len(self.rounds) - 1))
    monkeypatch.setattr(training, "best_of", lambda rounds, before: len(rounds) - 1)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take the GPU if there is one, and tests compare what they write with what the CPU computes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Nothing that a test writes has to survive a power cut; a file costs milliseconds to sync."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_lines_of_slow_steps() -> Iterator[None]:
    """A busy machine makes a step long enough for a line on stderr, where tests count lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "_LONG", math.inf)
        patch.setattr(progress, "_AGAIN", math.inf)
        yield


def _only_where_numbers_are(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda module: None if module.weight.is_meta else reset(module)


def _looked_at_once(require: Callable[..., None]) -> Callable[..., None]:
    """A config that fitted as many numbers once fits them again."""
    fitting: set[tuple[Any, str, int]] = set()

    def look(auto: Any, config: PreTrainedConfig, held: int, where: Path) -> None:
        key = auto, repr(config.to_dict()), held
        if key not in fitting:
            require(auto, config, held, where)
            fitting.add(key)

    return look


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """Transformers makes a table of GGUF's names for every module of a model, and typer all commands for every run.

    A tenth of the time of loading went into drawing numbers on the device meta, which has none, another into models
    made there of the same few configs to count their numbers, and the threads that transformers starts for every
    tensor wait for each other.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
        patch.setattr(from_folder, "require_held", _looked_at_once(from_folder.require_held))
        for kind in (torch.nn.Linear, torch.nn.Embedding):
            patch.setattr(kind, "reset_parameters", _only_where_numbers_are(kind.reset_parameters))
        for module, name in ((gguf, "get_tensor_name_map"), (typer.main, "get_command")):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _elsewhere_at_once() -> Iterator[None]:
    """What loads compact checkpoints without this package is forked from one process, which imports transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reloading, "subprocess", FORKED)
        yield
    FORKED.close()


@pytest.fixture(params=KINDS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> list[str]:
    """Every command that takes a model, one after the other."""
    return COMMANDS[request.param]


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return make_tiny


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """One shared tiny Llama; a test that changes its model makes its own."""
    return make_tiny("llama")


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(97, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def smollm2() -> Decoder:
    """The real built-in model. Tests that use it share one process: xdist_group("smollm2")."""
    return load("smollm2-135m")


@pytest.fixture(scope="session")
def english(smollm2: Decoder) -> TokenBatch:
    return load_text("builtin", smollm2.tokenizer, tokens=512, context=128)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def reader() -> PreTrainedModel:
    """A shared tiny Llama with the vocabulary of `tokenizer`; not to be changed."""
    return make_tiny("llama", vocab_size=len(VOCABULARY))


@pytest.fixture(scope="session")
def _saved_checkpoint(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    reader.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(_saved_checkpoint: Path, tmp_path: Path) -> Path:
    """`reader` and `tokenizer` in a folder that a test may spoil."""
    return Path(shutil.copytree(_saved_checkpoint, tmp_path / "tiny"))


@pytest.fixture
def run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command line in a folder that holds the checkpoint `tiny`."""
    monkeypatch.chdir(checkpoint.parent)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["lyapunov-prune", *arguments])
        capsys.readouterr()
        before = tree()
        with pytest.raises(SystemExit) as end:
            main()
        after = tree()
        changed = {path for path in before.keys() | after.keys() if before.get(path, 0) != after.get(path, 0)}
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Done(end.value.code, out, err, changed)

    return call


@pytest.fixture
def run_bad(run: Callable[..., Done]) -> Callable[..., str]:
    """Run with bad input: one line on stderr, exit code 2, nothing printed, nothing written. Returns the line."""

    def call(*arguments: str) -> str:
        done = run(*arguments)
        assert done.code == 2, done
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
        assert done.err.endswith("\n")
        assert done.out == ""
        assert done.changed == set()
        return done.err

    return call
