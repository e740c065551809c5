"""`explain`: packed, GGUF, pruned and healed checkpoints against the dense one, and what is refused."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TEXT, VOCABULARY, make_tiny, saved, write_gguf
from packed_kernels import write_packed_checkpoint
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.explaining.explanation import Explanation
from lyapunov_prune.pruning.provenance import PROVENANCE

FEW = ["--tokens", "96", "--context", "48"]


def explained(run: Any, *arguments: str) -> Explanation:
    done = run("explain", *arguments, *FEW, "-o", "why")
    assert done.code == 0, done
    assert "at most 13 forwards of 96 tokens" in done.err
    assert {"why/explanation.json", "why/report.html", "why/figures/explanation.svg"} <= done.changed
    found = Explanation.load("why/explanation.json")
    assert found.adds_up
    return found


@pytest.mark.usefixtures("drawn")
def test_what_compress_packed_is_explained(run: Any) -> None:
    packed = ["--method", "rtn", "--bits", "4", "--format", "packed"]
    assert run("compress", "tiny", *packed, "-o", "packed").code == 0
    assert run("profile", "tiny", "-o", "why", *TEXT).code == 0
    found = explained(run, "tiny", "packed")
    assert (found.energy[1] > 0).all()
    assert found.kl_only[0] == found.kl_only[-1] == 0  # embedding and head are not packed
    assert "rho" in found.to_frame()
    assert found.matrices is not None
    assert len(found.matrices.names) == 7 * len(found.blamed)
    assert (found.matrices.error > 0).all()


def test_packed_weights_are_explained_a_layer_at_a_time(run: Any, reader: PreTrainedModel) -> None:
    packed = ["--method", "rtn", "--bits", "4", "--format", "packed"]
    assert run("compress", "tiny", *packed, "-o", "packed").code == 0
    whole = explained(run, "tiny", "packed")
    done = run("explain", "tiny", "packed", "--device", "disk", *FEW, "-o", "streamed")
    assert done.code == 0, done
    assert "the files of each are read" in done.err
    found = Explanation.load("streamed/explanation.json")
    np.testing.assert_allclose(found.kl_only, whole.kl_only, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(found.kl_but, whole.kl_but, rtol=1e-3, atol=1e-7)
    assert found.matrices is not None
    write_gguf(reader, Path("model.gguf"))
    told = run("explain", "tiny", "model.gguf", "--device", "disk", *FEW)
    assert (told.code, "safetensors" in told.err) == (2, True), told


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
    assert run("prune", "dense.gguf", "--layers", "1,4", "--device", "disk", "-o", "pruned.gguf").code == 0
    found = explained(run, "dense.gguf", "pruned.gguf")
    assert found.kept == (0, 2, 3, 5)


def test_nothing_that_differs_is_said(run: Any) -> None:
    done = run("explain", "tiny", "tiny", *FEW)
    assert done.code == 0
    assert "Nothing differs" in done.out


def test_equal_weights_with_another_setting_are_told(run: Any) -> None:
    shutil.copytree("tiny", "other")
    config = json.loads(Path("other/config.json").read_text())
    Path("other/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    done = run("explain", "tiny", "other", *FEW)
    assert done.code == 0, done
    assert "the weights are the same, and the settings differ (its rms_norm_eps is 0.1" in done.out


@pytest.mark.usefixtures("healing_kept")
def test_a_healed_checkpoint_is_aligned_by_its_provenance(run: Any) -> None:
    assert run("prune", "tiny", "--layers", "1,4", "-o", "pruned", *TEXT).code == 0
    healing = ("--steps", "2", "--update-rank", "2", "--text", "builtin", *TEXT, "--tokens", "512")
    assert run("heal", "pruned", "-o", "healed", "--teacher", "tiny", *healing).code == 0
    found = explained(run, "tiny", "healed")
    assert found.kept == (0, 2, 3, 5)
    assert (found.energy[1] > 0).all()  # the layers that are gone, and those that learned


def test_adapters_are_merged(run: Any) -> None:
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained("tiny"),
        LoraConfig(r=2, target_modules=["q_proj", "down_proj"], layers_to_transform=[2], init_lora_weights=False),
    )
    adapted.save_pretrained("adapters")
    found = explained(run, "tiny", "adapters")
    assert found.energy[1].nonzero()[0].tolist() == [2]
    assert found.matrices is not None
    changed = [name for name, error in zip(found.matrices.names, found.matrices.error, strict=True) if error > 0]
    assert changed == ["model.layers.2.self_attn.q_proj", "model.layers.2.mlp.down_proj"]


def test_weights_that_stay_packed_are_run_and_not_read(run: Any) -> None:
    write_packed_checkpoint(make_tiny("llama", vocab_size=len(VOCABULARY)), Path("kernels"))
    for file in Path("tiny").glob("tokenizer*"):
        shutil.copy(file, "kernels")
    found = explained(run, "tiny", "kernels")
    assert found.kl > 0
    assert found.matrices is None


@pytest.mark.parametrize("which", ["dense", "compressed"])
def test_the_first_layer_that_is_not_finite_is_named(
    which: str, run: Any, reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    broken = copy.deepcopy(reader)
    with torch.no_grad():
        broken.model.layers[2].mlp.down_proj.weight[0, 0] = torch.nan
    saved(broken, tokenizer, Path("broken"))
    done = run("explain", *(("broken", "tiny") if which == "dense" else ("tiny", "broken")), *FEW)
    assert done.code == 2
    assert "broken" in done.err
    assert "layer 2" in done.err


def test_bad_input_is_refused_in_one_line(
    run: Any, checkpoint: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(VOCABULARY)
    for folder, model in {
        "other": make_tiny("gpt2", vocab_size=size),
        "larger": make_tiny("llama", vocab_size=size + 8),
        "wider": make_tiny("llama", vocab_size=size, hidden_size=64),
        "deeper": make_tiny("llama", vocab_size=size, num_hidden_layers=7),
    }.items():
        saved(model, tokenizer, Path(folder))
    assert run("prune", "tiny", "--layers", "1", "-o", "pruned", *TEXT).code == 0
    for arguments, told in (
        (("tiny", "other"), "family of gpt2 and the dense one of llama"),
        (("tiny", "larger"), f"vocabulary of {size + 8} and the dense one of {size}"),
        (("tiny", "wider"), "width of 64"),
        (("deeper", "pruned"), "it was made from 'tiny' of 6 layers"),
        (("tiny", "deeper"), "no provenance"),
        (("tiny",), "compressed"),
        (("tiny", "nowhere/at/all"), "no model at nowhere/at/all"),
    ):
        done = run("explain", *arguments, *FEW)
        assert done.code == 2, done
        assert told in done.err
        assert done.err.strip().count("\n") <= 1  # a cost may stand before it
