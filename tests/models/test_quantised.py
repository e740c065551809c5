"""Models whose weights only a library's kernels read: measured by what they do, never looked into, never changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import packed_kernels
import pytest
import torch
import transformers
from helpers import make_tiny
from packed_kernels import METHOD, PackedLinear, in_memory, write_packed_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.quantizers import AutoHfQuantizer

import lyapunov_prune as lp
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.evaluation import zero_share
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.models import quantised
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.quantised import is_packed
from lyapunov_prune.models.structure import identify
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.influence import block_influence
from lyapunov_prune.ranking.measured import rank_layers

CHANGED = rf"quantised \({METHOD}\)"
READ = rf"quantised \({METHOD}\) and packed, and this needs their values"


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(97, (4, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def small() -> PreTrainedModel:
    return in_memory(make_tiny("llama"))


@pytest.fixture
def checkpoint(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    write_packed_checkpoint(make_tiny("llama"), tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def twin(small: PreTrainedModel, ids: torch.Tensor) -> PreTrainedModel:
    with torch.no_grad():
        small(ids)
    return packed_kernels.dense(small, make_tiny("llama"))


def test_it_is_measured_as_the_dense_model_of_the_same_values(small: PreTrainedModel, ids: torch.Tensor) -> None:
    reference = twin(small, ids)
    for name in ("bi", "angular", "kl", "oracle"):
        ours, theirs = (lp.rank(model, ids, criterion=name, remove=2) for model in (small, reference))
        assert ours.plan(2).remove == theirs.plan(2).remove, name
    assert len(lp.rank(small, ids.reshape(8, 20), criterion="best", remove=2).plan(2).remove) == 2
    ours, theirs = (block_influence(model, ids).to_frame() for model in (small, reference))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    ours, theirs = (measure_contraction(model, ids, epsilon=0.2) for model in (small, reference))
    np.testing.assert_allclose(ours.rho, theirs.rho, rtol=1e-6)
    assert perplexity(small, ids).value == pytest.approx(perplexity(reference, ids).value, rel=1e-6)
    assert zero_share(small) == 0


def test_rho_rests_on_more_than_a_kernel_rounds_unseen(small: PreTrainedModel, ids: torch.Tensor) -> None:
    assert not measure_contraction(small, ids).above_floor.any()
    assert measure_contraction(small, ids, epsilon=0.2).above_floor.any()
    with pytest.raises(LyapunovPruneError, match="rounding floor"):
        lp.rank(small, ids, criterion="rho")
    profile = measure_contraction(small, ids, epsilon=0.2)
    assert len(rank_layers(profile, block_influence(small, ids), criterion="blend").plan(1).remove) == 1


def test_its_identity_is_one_before_and_after_it_ran_and_looking_spoils_nothing(ids: torch.Tensor) -> None:
    first, second = (in_memory(make_tiny("llama")) for _ in range(2))
    with torch.no_grad():
        logits = first(ids).logits
    before = identify(first)
    assert identify(first) == before
    assert identify(second) == before
    with torch.no_grad():
        assert torch.equal(first(ids).logits, logits)
        assert torch.equal(second(ids).logits, logits)
    assert identify(make_tiny("llama")).weights != before.weights
    projection: Any = second.model.layers[3].mlp.up_proj
    for change in (lambda: projection.scales[0, 5].mul_(1.5), lambda: projection.qweight[2, 1].add_(1)):
        seen = identify(second).weights
        change()
        assert identify(second).weights != seen


def test_what_would_change_or_read_the_weights_is_refused(small: PreTrainedModel, ids: torch.Tensor) -> None:
    changes: tuple[Callable[[], Any], ...] = (
        lambda: lp.remove_layers(small, [1]),
        lambda: lp.mend(small, [1], ids),
        lambda: lp.compress(small, method="magnitude", sparsity=0.5),
        lambda: lp.heal(small, make_tiny("llama"), ids, steps=1),
    )
    for change in changes:
        with pytest.raises(LyapunovPruneError, match=CHANGED):
            change()
    reads: tuple[Callable[[], Any], ...] = (
        lambda: lp.check_bounds(small, ids),
        lambda: lp.rank(small, ids, criterion="bi", what="attention"),
    )
    for read in reads:
        with pytest.raises(LyapunovPruneError, match=READ):
            read()


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"quant_method": "gptq", "bits": 4}, "run: pip install optimum gptqmodel"),
        ({"quant_method": "awq", "bits": 4}, "run: pip install gptqmodel"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "run: pip install bitsandbytes"),
        ({"quant_method": "hqq"}, "run: pip install hqq"),
        ({"quant_method": "fp8"}, r"on a machine with a GPU \(pip install kernels\)"),
        ({"quant_method": "mine"}, "has a reader.*; give the original weights"),
        ({"quant_method": "mxfp4", "dequantize": True}, "no reader.*; give the original weights"),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else "",
)
def test_what_is_missing_is_named_with_its_command(
    method: dict[str, Any], told: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU and without the libraries, whatever this one has."""

    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(quantised.metadata, "distribution", none)
    if "dequantize" not in method:
        monkeypatch.setattr(AutoHfQuantizer, "from_config", refusing(method["quant_method"]))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.raises(LyapunovPruneError, match=rf"quantised \({method['quant_method']}\).*{told}") as error:
        load(checkpoint)
    assert "\n" not in str(error.value)


def refusing(method: str) -> Callable[..., Any]:
    """transformers' answer where the library or the GPU is missing."""

    def from_config(*args: Any, **options: Any) -> Any:
        if method == "fp8":
            raise RuntimeError("No GPU or XPU found")
        raise ImportError(f"{method} is not installed")

    return from_config


def test_a_derivative_that_a_kernel_drops_is_refused(small: PreTrainedModel, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="derivatives"):
        measure_contraction(small, ids, method="jvp")


def test_a_packed_head_is_refused(small: PreTrainedModel, ids: torch.Tensor) -> None:
    small.lm_head = PackedLinear(32, 97)
    with pytest.raises(LyapunovPruneError, match="head of this LlamaForCausalLM"):
        block_influence(small, ids)


def test_a_kernel_that_fails_is_one_line(small: PreTrainedModel, ids: torch.Tensor) -> None:
    small.model.layers[0].mlp.up_proj.qweight = torch.zeros(3, 3, dtype=torch.int32)
    with pytest.raises(LyapunovPruneError, match="they do not run here"):
        block_influence(small, ids)


def test_layers_are_found_though_their_weights_are_buffers(small: PreTrainedModel) -> None:
    small.model.others = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))  # more parameters than the layers have left
    assert lp.models.structure.find_layers(small).layers is small.model.layers


def test_a_packed_checkpoint_is_loaded_and_measured(checkpoint: Path, ids: torch.Tensor) -> None:
    loaded = load(checkpoint)
    assert is_packed(loaded.model)
    assert any(isinstance(module, PackedLinear) for module in loaded.model.modules())
    reference = twin(in_memory(make_tiny("llama")), ids)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, reference(ids).logits, rtol=1e-5, atol=1e-5)
    assert identify(loaded.model).weights == identify(in_memory(make_tiny("llama"))).weights


def test_what_a_method_lacks_is_said_before_a_weight_is_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(packed_kernels.Quantizer, "missing", "It needs hands.")
    with pytest.raises(LyapunovPruneError, match="It needs hands"):
        load(checkpoint)


def test_kernels_that_fail_are_told_on_loading(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "values", lambda module: 1 / 0)
    with pytest.raises(LyapunovPruneError, match="ZeroDivisionError"):
        load(checkpoint)


# With bitsandbytes, whose kernels run on the CPU too.


@pytest.fixture(params=["8 bits", "fp4", "nf4, scales quantised too"])
def bits(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    make_tiny("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "wide")
    options: dict[str, dict[str, Any]] = {
        "8 bits": {"load_in_8bit": True},
        "fp4": {"load_in_4bit": True},
        "nf4, scales quantised too": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
    }
    config = transformers.BitsAndBytesConfig(**options[request.param])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", quantization_config=config, device_map="cpu")
    model.save_pretrained(tmp_path / "small")
    return model.eval(), tmp_path / "small"


def test_bitsandbytes_is_measured(
    bits: tuple[PreTrainedModel, Path], tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor
) -> None:
    model, folder = bits
    tokenizer.save_pretrained(folder)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder).eval().dequantize().float()
    loaded = load(folder).model
    with torch.no_grad():
        logits = loaded(ids).logits
    assert identify(loaded).weights == identify(model).weights
    for criterion in ("bi", "angular", "kl"):
        ours, theirs = (lp.rank(m, ids, criterion=criterion, remove=1).plan(1).remove for m in (loaded, reference))
        assert ours == theirs, criterion
    ours, theirs = (measure_contraction(m, ids, epsilon=0.2).rho for m in (loaded, reference))
    np.testing.assert_allclose(ours, theirs, rtol=0.02)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, logits)


def test_bitsandbytes_is_not_changed(bits: tuple[PreTrainedModel, Path], ids: torch.Tensor) -> None:
    model, _ = bits
    for change in (
        lambda: lp.remove_layers(model, [1]),
        lambda: lp.compress(model, method="magnitude", sparsity=0.5),
        lambda: lp.mend(model, [1], ids),
        lambda: lp.heal(model, copy.deepcopy(model), ids, steps=1),
    ):
        with pytest.raises(LyapunovPruneError, match=r"quantised \(bitsandbytes\)"):
            change()
    with pytest.raises(LyapunovPruneError, match="derivatives"):
        measure_contraction(model, ids, method="jvp")
    with pytest.raises(LyapunovPruneError, match="packed"):
        lp.check_bounds(model, ids)
