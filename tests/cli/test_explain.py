"""`explain`: packed, GGUF, pruned and healed checkpoints against the dense one, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import TEXT, VOCABULARY, make_tiny, saved, write_gguf
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.explaining.explanation import Explanation
from lyapunov_prune.pruning.provenance import PROVENANCE

FEW = ["--tokens", "96", "--context", "48"]


def explained(run: Any, *arguments: str) -> Explanation:
    done = run("explain", *arguments, *FEW, "-o", "why")
    assert done.code == 0, done
    assert "At most 14 forwards of 96 tokens" in done.err
    assert {"why/explanation.json", "why/report.html", "why/figures/explanation.svg"} <= done.changed
    found = Explanation.load("why/explanation.json")
    assert found.adds_up
    return found


def test_what_compress_packed_is_explained(run: Any) -> None:
    packed = ["--method", "rtn", "--bits", "4", "--format", "compressed-tensors"]
    assert run("compress", "tiny", *packed, "-o", "packed").code == 0
    assert run("profile", "tiny", "-o", "prof", *TEXT).code == 0
    found = explained(run, "tiny", "packed", "--profile", "prof/profile.json")
    assert (found.energy[1] > 0).all()
    assert found.kl_only[0] == found.kl_only[-1] == 0  # embedding and head are not packed
    assert "rho" in found.to_frame()
    assert found.matrices is not None
    assert len(found.matrices.names) == 7 * len(found.blamed)
    assert (found.matrices.error > 0).all()


def test_a_gguf_file_is_explained(run: Any, reader: PreTrainedModel) -> None:
    write_gguf(reader, Path("q8.gguf"), packed=True)
    found = explained(run, "tiny", "q8.gguf")
    assert found.kl > 0
    assert found.kl_only[0] > 0  # its embedding is quantised too


def test_a_pruned_checkpoint_is_aligned_by_its_provenance(run: Any) -> None:
    assert run("prune", "tiny", "--layers", "1,4", "-o", "pruned", *TEXT).code == 0
    found = explained(run, "tiny", "pruned")
    assert found.kept == (0, 2, 3, 5)
    assert found.energy[1].nonzero()[0].tolist() == [1, 4]
    (Path("pruned") / PROVENANCE).unlink()
    told = run("explain", "tiny", "pruned", *FEW)
    assert (told.code, "no provenance" in told.err) == (2, True)


def test_a_pruned_gguf_file_is_aligned_by_its_header(run: Any, reader: PreTrainedModel) -> None:
    write_gguf(reader, Path("dense.gguf"))
    assert run("prune", "dense.gguf", "--layers", "1,4", "--on-disk", "-o", "pruned.gguf").code == 0
    found = explained(run, "dense.gguf", "pruned.gguf")
    assert found.kept == (0, 2, 3, 5)


def test_nothing_that_differs_is_said(run: Any) -> None:
    done = run("explain", "tiny", "tiny", *FEW)
    assert done.code == 0
    assert "Nothing differs" in done.out


def test_bad_input_is_refused_in_one_line(
    run: Any, checkpoint: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(make_tiny("gpt2", vocab_size=len(VOCABULARY)), tokenizer, Path("other"))
    for arguments, told in (
        (("tiny", "other"), "is a gpt2 and the dense one a llama"),
        (("tiny", "nowhere/at/all"), "no model at nowhere/at/all"),
        (("tiny", "tiny", "--profile", "none.json"), "none.json"),
    ):
        done = run("explain", *arguments, *FEW)
        assert done.code == 2, done
        assert told in done.err
        assert done.err.strip().count("\n") <= 1  # a cost may stand before it
