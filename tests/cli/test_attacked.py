"""Options and weights drawn around valid ones, for every command that makes or reads a model: done, or one line.

`LYAPUNOV_PRUNE_EXAMPLES` says how many are drawn, see test_drawn.py.
"""

from __future__ import annotations

import json
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest
import typer
from cli.test_drawn import NUMBERS, WORDS, damaged, few, must_end_well
from helpers import Done
from hypothesis import given
from hypothesis import strategies as st

from lyapunov_prune.cli.app import app

TEXT = ("--tokens", "64", "--context", "8")
MEASURED = (*TEXT, "--device", "cpu")
PRUNE = ("prune", "tiny", *MEASURED)
PACK = ("compress", "tiny", "--method", "rtn", "--format", "packed", "--device", "cpu")
# What has been made before, by the name that a command reads it by.
MADE = {
    "pruned": (*PRUNE, "--layers", "1"),
    "compact": (*PRUNE, "--what", "attention", "--layers", "1"),
    "packed": (*PACK, "--bits", "4"),
}
COMMANDS = {
    "eval": ("eval", "tiny", *MEASURED),
    "profile": ("profile", "tiny", "--seeds", "1", *MEASURED),
    "profile --device disk": ("profile", "tiny", "--device", "disk", "--seeds", "1", *MEASURED),
    "rank best": ("rank", "tiny", "--criterion", "best", "--remove", "1", *MEASURED),
    "rank --device disk": ("rank", "tiny", "--device", "disk", "--criterion", "bi", "--remove", "1", *MEASURED),
    "rank attention": ("rank", "tiny", "--what", "attention", "--criterion", "kl", "--remove", "1", *MEASURED),
    "prune": (*PRUNE, "--remove", "1"),
    "prune --mend": (*PRUNE, "--remove", "1", "--mend", "--tokens", "256"),
    "prune --device disk": ("prune", "tiny", "--layers", "1", "--device", "disk"),
    "joint": ("joint", "tiny", "--remove", "1", *MEASURED),
    "heal": ("heal", "pruned", "--teacher", "tiny", "--steps", "1", *MEASURED, "--tokens", "128"),
    "heal --text self": (
        "heal",
        "pruned",
        "--teacher",
        "tiny",
        "--text",
        "self",
        "--steps",
        "1",
        *MEASURED,
        "--tokens",
        "128",
    ),
    "pack": (*PACK, "--bits", "4"),
    "check": ("check", "tiny", "--bounds", *MEASURED),
    "sensitivity": ("sensitivity", "tiny", "--study", "layer", *MEASURED),
    "hierarchy": ("hierarchy", "tiny", "--new-tokens", "2", *MEASURED),
}
# What a command that reads a model made here does with it.
READERS = {
    "compact": ("eval", "compact", *MEASURED),
    "packed": ("eval", "packed", *MEASURED),
    "pruned": ("profile", "pruned", "--seeds", "1", *MEASURED),
}
# Every option that takes a value, of any command; what is written where, and who is asked for it, stays.
OPTIONS = sorted(
    {
        word
        for command in typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
        for option in command.params
        for word in option.opts
        if word.startswith("--") and not getattr(option, "is_flag", False)
    }
    - {"--output", "--teacher", "--against"}
)
VALUES = (NUMBERS.map(str) | WORDS | st.sampled_from(["all", "0,1,2", "-1", "auto", "mlp", "tiny", "1e-9"])).filter(
    lambda word: "\0" not in word  # no argument can hold it
)
Attempt = Callable[..., Done]


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """A value that asks for more memory than a machine has is a failure here, and not the end of the machine."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.fixture(autouse=True)
def one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting of `check` takes the way of thirty, in a thirtieth of the time."""
    module = import_module("lyapunov_prune.bounds.check")
    one = partial(module.check_grid, sparsities=(0.5,), ranks=(None,), cache_radii=(0.0,))
    monkeypatch.setattr(module, "check_grid", one)


@pytest.fixture
def attempt(run: Callable[..., Done], name: str, healing_kept: None) -> Attempt:
    """Run with an output of its own, which is removed afterwards; what the command `name` reads is there."""
    numbers = count()
    read = {**COMMANDS, **READERS}[name][1]
    if read in MADE:
        assert run(*MADE[read], "-o", read).code == 0

    def call(*arguments: str) -> Done:
        out = Path(f"out-{next(numbers)}")
        done = run(*arguments, "-o", str(out))
        shutil.rmtree(out, ignore_errors=True)
        # What was measured before a fault was found is kept for the next run: jobs, and costs that no budget bears.
        finished = ("jobs", "sensitivity")  # folders of measurements; the profile beside a sensitivity is one too
        kept = {
            path
            for path in done.changed
            if done.code == 2 and (set(finished) & set(Path(path).parts) or "costs" in done.err)
        }
        kept |= {str(folder) for path in kept for folder in Path(path).parents}
        return replace(done, changed=done.changed - kept)

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_of_any_value(name: str, attempt: Attempt) -> None:
    @few
    @given(st.sampled_from(OPTIONS), VALUES)
    def check(option: str, value: str) -> None:
        must_end_well(attempt(*COMMANDS[name], f"{option}={value}"))

    check()


@st.composite
def spoilt(draw: st.DrawFn, whole: bytes) -> bytes:
    """A safetensors file cut short, of another header, or of other bytes."""
    (size,) = struct.unpack("<Q", whole[:8])
    header, data = whole[8 : 8 + size], whole[8 + size :]
    how = draw(st.sampled_from(["header", "header", "cut", "size", "bytes"]))
    if how == "header":
        text = json.dumps(draw(damaged(json.loads(header)))).encode()
        return struct.pack("<Q", len(text)) + text + data
    if how == "cut":
        return whole[: draw(st.integers(0, len(whole) - 1))]
    if how == "size":
        return struct.pack("<Q", draw(st.integers(0, 2**64 - 1) | st.integers(0, 2 * size))) + whole[8:]
    start = draw(st.integers(0, len(data) - 1))
    return (
        whole[: 8 + size] + data[:start] + draw(st.sampled_from([b"\xff" * 64, b"\x7f\x7f" * 32])) + data[start + 64 :]
    )


@pytest.mark.parametrize("name", [*COMMANDS, *READERS])
def test_weights_of_any_kind(name: str, attempt: Attempt) -> None:
    command = {**COMMANDS, **READERS}[name]
    file = Path(command[1]) / "model.safetensors"
    whole = file.read_bytes()

    @few
    @given(spoilt(whole))
    def check(content: bytes) -> None:
        file.write_bytes(content)
        must_end_well(attempt(*command))

    check()


@pytest.mark.parametrize("name", READERS)
def test_a_config_of_any_kind(name: str, attempt: Attempt) -> None:
    file = Path(name) / "config.json"
    whole = json.loads(file.read_text())

    @few
    @given(damaged(whole))
    def check(document: object) -> None:
        file.write_text(json.dumps(document))
        must_end_well(attempt(*READERS[name]))

    check()
