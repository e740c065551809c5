"""Processes forked from one that has imported transformers and not this package: a start takes no seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Reads a request a line: programs that run at the same time, each with its argument, environment and folder. Answers
# with the exit code, stdout and stderr of each.
_SERVER = """
import atexit, contextlib, faulthandler, json, os, signal, sys, tempfile, traceback
import accelerate, safetensors.torch, torch, transformers
import transformers.dynamic_module_utils as dynamic
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

torch.set_num_threads(1)  # as in the tests

def run(program, argument, env, cwd):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if "HF_MODULES_CACHE" in env:
        dynamic.HF_MODULES_CACHE = env["HF_MODULES_CACHE"]  # read when transformers was imported
    sys.argv = ["-c", argument]
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

def start(request, files):
    child = os.fork()
    if child:
        return child
    signal.alarm(300)  # ends a process that waits for another forever
    for number, file in enumerate((open(os.devnull), *files)):
        os.dup2(file.fileno(), number)
    faulthandler.enable()
    code = run(*request)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    with contextlib.ExitStack() as stack:
        started, answer = [], []
        for request in json.loads(line):
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            started.append((start(request, files), files))
        for child, files in started:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for file in files:
                file.seek(0)
            answer.append([code, *(file.read() for file in files)])
        print(json.dumps(answer), flush=True)
"""


class Forked:
    """Stands for the module `subprocess` where programs that need transformers alone are run."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, command: list[str], *, env: dict[str, str], cwd: str, **_: Any) -> subprocess.CompletedProcess[str]:
        """`python -c PROGRAM ARGUMENT`."""
        *_, program, argument = command
        (done,) = self.run_together(program, [env], cwd, argument)
        return subprocess.CompletedProcess(command, *done)

    def run_together(
        self, program: str, envs: Sequence[Mapping[str, str]], cwd: str, argument: str = ""
    ) -> list[tuple[int, str, str]]:
        """`program` in one process per environment, all at the same time: exit code, stdout and stderr of each."""
        if self._server is None:
            quiet = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
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
        self._server.stdin.write(json.dumps([[program, argument, dict(env), cwd] for env in envs]) + "\n")
        self._server.stdin.flush()
        return [(code, out, err) for code, out, err in json.loads(self._server.stdout.readline())]

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


FORKED = Forked()
