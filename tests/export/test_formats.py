"""One way to write a plan, in two formats: the same maps, one provenance, every fault seen by the gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Done, make_tiny, saved
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.export import compact
from lyapunov_prune.export import pruned as writing
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_gate import verify_compact
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.merging import merge
from lyapunov_prune.models.compact import MODULE
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.structure import find_layers, identify
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.pruning.removed import LayersGone, PartsGone
from lyapunov_prune.results.history import read_history

GOES = PartsGone((2,), (0, 4), (1, 4), "affine")
TEXT = ("--tokens", "256", "--context", "64")


@pytest.fixture
def batch(ids: torch.Tensor) -> TokenBatch:
    return TokenBatch(ids, "a book", "calibration", None)


@pytest.fixture
def _here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process that takes seconds to start: `test_compact_checkpoint` has it."""
    passed = GateCheck("reloads without this package", True, 0.0, 1.0, "not run: it takes seconds")
    monkeypatch.setattr("lyapunov_prune.export.compact_gate.elsewhere_check", lambda *_, **__: passed)


# What is written.


def test_a_plan_in_the_compact_format(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, batch: TokenBatch, tmp_path: Path
) -> None:
    """Layers, attentions and activations of one plan, with all five checks."""
    plan = PruningPlan.given(reader, GOES)
    provenance = write_pruned(reader, tokenizer, plan, tmp_path / "small", batch, format="compact")
    written = Provenance.load(tmp_path / "small" / PROVENANCE)
    assert str(written) == str(provenance)
    assert (written.format, written.kept_to_original, written.gate.passed) == ("compact", (0, 1, 3, 4, 5), True)
    assert written.plan.measured_on == (batch.measured_on(reader),)
    assert [step.saw for step in read_history(tmp_path / "small").steps] == [written.plan.measured_on]
    cuts = json.loads((tmp_path / "small" / "config.json").read_text())["cuts"]
    assert [sorted(places) for places in cuts] == [
        ["input_layernorm", "self_attn"], ["mlp"], [], ["input_layernorm", "mlp", "self_attn"], []
    ]  # fmt: skip
    loaded = load(tmp_path / "small").model
    assert [m.layer_idx for m in loaded.modules() if hasattr(m, "layer_idx")] == [0, 1, 2]
    held = load_file(tmp_path / "small" / "model.safetensors")
    assert sum(t.numel() for t in held.values()) == loaded.num_parameters() < reader.num_parameters()
    card = (tmp_path / "small" / "README.md").read_text()
    assert "Attention of layers of the original: 0, 4. It is gone" in card
    assert "Activation of the feed-forward block (reduction affine) of layers of the original: 1, 4." in card
    assert "merged blocks fitted, on:\n\n- " in card
    assert "cannot load" in card
    assert "## Engines" not in card
    assert not (tmp_path / "small" / "gate.json").exists()


@pytest.mark.usefixtures("_here_alone")
def test_a_narrow_dtype_passes(tokenizer: PreTrainedTokenizerFast, batch: TokenBatch, tmp_path: Path) -> None:
    model = make_tiny("llama").bfloat16()
    plan = PruningPlan.given(model, PartsGone((), (), (0, 1, 2, 3, 4, 5), "scaled"))
    assert write_pruned(model, tokenizer, plan, tmp_path / "small", batch, format="compact").gate.passed


def test_every_family_loses_layers_attentions_and_activations_at_once(family: str, batch: TokenBatch) -> None:
    model = make_tiny(family)
    plan = PruningPlan.given(model, GOES)
    before = identify(model)
    cuts = Cuts.of(plan, merge.merge_layers(model, batch, GOES.activation, "affine"))
    report = verify_compact(model, make_compact(model, cuts), cuts, batch, elsewhere=False)
    assert report.passed, f"\n{report}"
    assert identify(model) == before


@pytest.mark.usefixtures("_here_alone")
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "opt"])  # with another prefix
def test_what_was_read_from_files_is_saved_by_the_names_of_its_class(
    family: str, tokenizer: PreTrainedTokenizerFast, batch: TokenBatch, tmp_path: Path
) -> None:
    """A checkpoint of GPT-NeoX calls its head `embed_out`, and transformers asks a class of its own for `lm_head`."""
    loaded = load(saved(make_tiny(family), tokenizer, tmp_path / "tiny"))
    plan = PruningPlan.given(loaded.model, GOES)
    write_pruned(loaded.model, tokenizer, plan, tmp_path / "small", batch, format="compact")
    assert load(tmp_path / "small").structure.num_layers == 5


# Planted faults.


def transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = merge.product
    monkeypatch.setattr(merge, "product", lambda *given: (right(*given)[0].T, right(*given)[1]))


def lost_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    right = merge.product
    monkeypatch.setattr(merge, "product", lambda *given: (right(*given)[0], None))


def other_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block gets the matrix of the other."""
    right = merge.merge_layers

    def swapped(*given: Any) -> Any:
        a, b = right(*given)
        return replace(a, weight=b.weight, bias=b.bias), replace(b, weight=a.weight, bias=a.bias)

    monkeypatch.setattr(writing, "merge_layers", swapped)


def one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little for the logits."""
    right = merge.product

    def moved(*given: Any) -> Any:
        W, b = right(*given)
        W[3, 5] += 1e-5 * W[3].norm()
        return W, b

    monkeypatch.setattr(merge, "product", moved)


def next_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block after the one that was asked for loses its activation."""
    right = make_compact
    shifted = lambda cuts: replace(cuts, merged={i + 1: each for i, each in cuts.merged.items()}, hidden={})  # noqa: E731
    monkeypatch.setattr(compact, "make_compact", lambda model, cuts, **how: right(model, shifted(cuts), **how))


def old_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches as transformers makes them, and attentions with the numbers of their layers."""
    right = make_compact

    def unnumbered(model: PreTrainedModel, cuts: Cuts, **how: bool) -> PreTrainedModel:
        made: Any = right(model, cuts, **how)
        for index, layer in enumerate(find_layers(made).layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = index
        made.model._forward_pre_hooks.clear()
        return made

    monkeypatch.setattr(compact, "make_compact", unnumbered)


@pytest.mark.usefixtures("_here_alone")
@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (transposed, "same as skipping"),
        (lost_bias, "same as skipping"),
        (other_layer, "same as skipping"),
        (next_layer, "same as skipping"),
        (old_numbers, "cached decoding"),
        (one_number, "merged within rounding"),
    ],
)
def test_a_planted_fault_is_refused(
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batch: TokenBatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    check: str,
) -> None:
    fault(monkeypatch)
    plan = PruningPlan.given(reader, PartsGone((), (0,), (1, 4), "affine"))
    with pytest.raises(CheckFailed, match=f"{check}"):
        write_pruned(reader, tokenizer, plan, tmp_path / "small", batch, format="compact")
    assert not list(tmp_path.iterdir())


# Bad input.


@pytest.mark.parametrize(
    ("goes", "format", "message"),
    [
        (PartsGone((), tuple(range(6))), "compact", "count positions"),
        (PartsGone((0,), tuple(range(1, 6))), "compact", "no attention is left"),
        (LayersGone((1,)), "compact", "as plain"),
        (PartsGone((), (), (1,), "identity"), "compact", "identity .*gated"),
        (PartsGone((), (), (1,), "affine"), "plain", "format .compact"),
        (PartsGone((), (1,)), "plain", "format .compact"),
        (PartsGone((), (1,)), "small", "unknown format 'small'"),
    ],
)
def test_a_plan_that_a_format_cannot_hold(
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batch: TokenBatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    goes: LayersGone,
    format: str,
    message: str,
) -> None:
    monkeypatch.setattr(writing, "merge_layers", None)  # before anything is fitted
    with pytest.raises(LyapunovPruneError, match=message) as refused:
        write_pruned(reader, tokenizer, PruningPlan.given(reader, goes), tmp_path / "small", batch, format=format)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_matrices_that_layers_share_are_refused(
    tokenizer: PreTrainedTokenizerFast, batch: TokenBatch, tmp_path: Path
) -> None:
    model = make_tiny("llama")
    layers: Any = find_layers(model).layers
    layers[3].mlp.down_proj.weight = layers[1].mlp.down_proj.weight
    plan = PruningPlan.given(model, PartsGone((), (), (1,), "affine"))
    with pytest.raises(LyapunovPruneError, match=r"layer 1 is also .*layer 3"):
        write_pruned(model, tokenizer, plan, tmp_path / "small", batch, format="compact")


def test_a_reduction_needs_a_text(reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    plan = PruningPlan.given(reader, PartsGone((), (), (1,), "affine"))
    with pytest.raises(LyapunovPruneError, match="reduction affine"):
        write_pruned(reader, tokenizer, plan, tmp_path / "small", format="compact")


# The command line.


@pytest.mark.usefixtures("_here_alone")
def test_prune_by_hand_and_by_plan(run: Callable[..., Done]) -> None:
    hand = ("--what", "activation", "--layers", "1,4")
    done = run("prune", "tiny", *hand, "-o", "small", *TEXT)
    assert done.code == 0, done.err
    assert "(reduction affine) of 2 of 6" in done.out + done.err
    assert Path("small", MODULE).is_file()
    assert isinstance(find_layers(load("small").model).layers[1].mlp, nn.Linear)
    PruningPlan.given(load("tiny").model, replace(GOES, reduction="scaled")).save(Path("plan.json"))
    assert run("prune", "tiny", "--plan", "plan.json", "-o", "smaller", *TEXT).code == 0
    assert Provenance.load(Path("smaller") / PROVENANCE).plan.gone.reduction == "scaled"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--what", "activation", "--remove", "1"], "orders activations"),
        (["--what", "attention", "--layers", "0,1,2,3,4,5"], "no attention is left"),
        (["--what", "attention", "--layers", "1", "--device", "disk"], "--what .*in memory"),
    ],
)
def test_bad_options(options: list[str], message: str, run: Callable[..., Done]) -> None:
    import re

    done = run("prune", "tiny", *options, "-o", "small", *TEXT)
    assert (done.code, done.changed) == (2, set())
    assert re.search(message, done.err), done.err
