"""Processes without this package, forked from one that has imported transformers: a start takes no seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

# Reads a request a line: a program, its argument, environment and folder. Answers with its exit code and stderr.
_SERVER = """
import json, os, sys, tempfile, traceback
import accelerate, safetensors.torch, torch, transformers
import transformers.dynamic_module_utils as dynamic
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

def run(program, argument, env, cwd):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    dynamic.HF_MODULES_CACHE = env["HF_MODULES_CACHE"]  # read when transformers was imported
    sys.argv = ["-c", argument]
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(err.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            code = run(*json.loads(line))
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        err.seek(0)
        print(json.dumps([code, err.read()]), flush=True)
"""


class Forked:
    """Stands for the module `subprocess` where programs that need transformers alone are run."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, command: list[str], *, env: dict[str, str], cwd: str, **_: Any) -> subprocess.CompletedProcess[str]:
        """`python -c PROGRAM ARGUMENT`."""
        *_, program, argument = command
        if self._server is None:
            quiet = env | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER],
                env=quiet,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps([program, argument, env, cwd]) + "\n")
        self._server.stdin.flush()
        code, err = json.loads(self._server.stdout.readline())
        return subprocess.CompletedProcess(command, code, "", err)

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()
