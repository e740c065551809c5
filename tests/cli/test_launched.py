"""Commands in two processes of `accelerate launch`: one prints and writes, what one process alone writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import QUICK, TEXT, launched_twice
from safetensors.torch import load_file

SCRIPT = """
import contextvars, os, sys
import torch
torch.cuda.is_available = lambda: False
from lyapunov_prune.cli.app import main

def run(*arguments):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        print(f"{{arguments[0]}}: {{end.code}}", flush=True)

os.chdir({folder!r})
for command in {commands!r}:
    contextvars.copy_context().run(run, *command)
    torch.distributed.barrier()
"""
COMMANDS = (
    ("profile", "tiny", *QUICK),
    ("prune", "tiny", "--remove", "2", "--criterion", "best", "-o", "smaller", *TEXT),
    ("explain", "tiny", "smaller", "-o", "explained", *TEXT),
    ("compress", "tiny", "--method", "gptq", "--bits", "4", "-o", "rounded", *TEXT),
)


def test_one_of_two_processes_prints_and_writes_what_a_single_one_does(run: Any, tmp_path: Path) -> None:
    alone = [run(*command) for command in COMMANDS]
    assert [done.code for done in alone] == [0] * len(COMMANDS)
    together = tmp_path / "together"
    together.mkdir()
    (together / "tiny").symlink_to(Path("tiny").absolute())
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(together), commands=COMMANDS))
    done = launched_twice(script)
    assert done.returncode == 0, done.stderr
    first = "".join(f"{each.out}{command[0]}: 0\n" for command, each in zip(COMMANDS, alone, strict=True))
    second = "".join(f"{command[0]}: 0\n" for command in COMMANDS)
    assert done.stdout == first + second
    made = {path.relative_to(together) for path in together.rglob("*") if "jobs" not in path.parts}
    assert {path for path in made if path.parts[0] != "tiny"} == {
        path
        for name in ("runs", "smaller", "explained", "rounded")
        for path in (Path(name), *Path(name).rglob("*"))
        if "jobs" not in path.parts
    }
    for name in ("smaller", "rounded"):
        wanted, found = (load_file(folder / name / "model.safetensors") for folder in (Path(), together))
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor)
