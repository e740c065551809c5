"""Processes of one launch: they part before the interpreter ends, and share work on one model or refuse it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from helpers import free_port, launched_twice
from helpers.forked import FORKED

from lyapunov_prune.models.launched import processes


def test_a_process_by_itself_joins_nothing() -> None:
    assert processes(on_cpu=True).num_processes == 1
    assert not torch.distributed.is_initialized()


def test_a_torch_without_processes_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    assert processes(on_cpu=True).num_processes == 1


SCRIPT = """
import atexit, sys, torch
atexit.register(lambda: print(torch.distributed.is_initialized()))  # the last of what runs at exit
if sys.argv[1] == "theirs":
    torch.distributed.init_process_group("gloo")
from lyapunov_prune.models.launched import processes
processes(on_cpu=True), processes(on_cpu=True)
print(torch.distributed.is_initialized())
"""


@pytest.mark.parametrize(("whose", "left"), [("ours", "False"), ("theirs", "True")])
def test_processes_that_were_joined_here_part_before_the_interpreter_ends(whose: str, left: str) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    ((_, out, err),) = FORKED.run_together(SCRIPT, [{**os.environ, **alone, **place}], "/", whose)
    assert out.split() == ["True", left], err


SHARED = """
import os, sys
import torch
from lyapunov_prune.cli.failures import as_refusal
from lyapunov_prune.models.launched import processes_of, require_alike
from lyapunov_prune.sensitivity.sweep import Sweep

sys.path.insert(0, {tests!r})
from helpers import make_tiny

rank = int(os.environ["RANK"])
one, another = make_tiny("llama"), make_tiny("qwen2")
among = processes_of(one)
require_alike(among, "texts", "the same")


def refused(attempt):
    try:
        attempt()
    except BaseException as error:
        refusal = as_refusal(error, [])
        sys.stdout.write(f"{{refusal.exit_code}} {{rank}}: {{refusal}}\\n")  # in one piece


ids = torch.arange(64).reshape(2, 32)
refused(lambda: processes_of(one, (one, another)[rank]))
refused(lambda: Sweep((one, another)[rank], ids, folder={folder!r}))
refused(lambda: Sweep(one, ids + rank, folder={folder!r}))
if rank == 1:
    os._exit(2)
refused(among.wait_for_everyone)
"""


def test_processes_of_different_models_all_refuse_and_a_peer_that_is_lost_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHARED.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path / "jobs")))
    done = launched_twice(script)
    wanted = [f"2 {rank}: .*different {what}" for rank in (0, 1) for what in ("models", "models", "texts")]
    lines = sorted(done.stdout.splitlines(), key=lambda line: (line[:4], "different" not in line, line))
    wanted.insert(3, "2 0: another process failed")
    assert len(lines) == len(wanted), done.stderr
    assert all(re.match(*pair) for pair in zip(wanted, lines, strict=True)), lines
    assert not (tmp_path / "jobs").exists()
