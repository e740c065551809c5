"""`compress`: schedules, budgets and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TEXT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lyapunov_prune.compression.report import CompressionReport


def test_compress_writes_a_plain_checkpoint_that_says_what_it_is(run: Any) -> None:
    done = run("compress", "tiny", "--method", "wanda", "--sparsity", "2:4", "-o", "out", *TEXT)
    assert done.code == 0
    assert "neither memory nor time is saved" in done.out
    AutoModelForCausalLM.from_pretrained("out")
    assert Path("out/compression.json").is_file()
    done = run("eval", "out", "--against", "tiny", *TEXT)
    assert done.code == 0
    assert "50% of the entries are zero" in done.out


def test_an_allocation_is_named_or_read(run: Any) -> None:
    sparse = ["compress", "tiny", "--method", "magnitude", "-o"]
    assert run(*sparse, "a", "--sparsity", "50%", "--allocation", "atp").code == 0
    allocation = CompressionReport.load("a/compression.json").allocation
    allocation.save("allocation.json")
    assert run(*sparse, "b", "--allocation", "allocation.json").code == 0
    a, b = (load_file(f"{name}/model.safetensors") for name in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--method", "wanda", "--sparsity", "2-4"], "a pattern, as 2:4"),
        (["--method", "wanda", "--bits", "4"], "takes sparsity"),
        (["--method", "wanda", "--sparsity", "0.5", "--allocation", "none.json"], "none.json is not there"),
        (["--method", "best", "--sparsity", "0.5"], "'best' is not one of"),
        (["--method", "magnitude", "--sparsity", "0.5"], "--tokens has no effect"),
        (["--method", "rtn", "--bits", "4"], "--tokens has no effect"),
        (["--method", "wanda", "--sparsity", "0"], "'0' is neither a share"),
        (["--method", "wanda", "--sparsity", "0.5", "-o", "out.gguf"], "export that"),
    ],
)
def test_compress_refuses_before_it_loads(run: Any, args: list[str], message: str) -> None:
    done = run("compress", "tiny", "-o", "out", *args, *TEXT)
    assert done.code == 2
    assert message in done.err
    assert not done.changed
