"""Encoder-decoders: what each stack gives for profile, rank and prune, and that the rest refuses them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families.stacks import LAYERS, SETTINGS, STACKS, START, make
from helpers import Done
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import (
    LyapunovPruneError,
    PruningPlan,
    block_influence,
    check_bounds,
    compress,
    measure_contraction,
    mend,
    perplexity,
    rank,
    remove_layers,
    verify_removal,
)
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.encoders import Stack
from lyapunov_prune.models.families import FAMILIES
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.two_stacks import stack_structure
from lyapunov_prune.predictions.divergence import skip_divergence
from lyapunov_prune.profiles.propagation import direction

FIRST_STAYS = ("longt5", "mt5", "switch_transformers", "t5")
CORE = ("bart", "marian", "mbart", "pegasus", "t5")


def given(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the two stacks read of `ids`."""
    half = ids.shape[1] // 2
    start = torch.full((len(ids), 1), START)
    return {"input_ids": ids[:, :half], "decoder_input_ids": torch.cat([start, ids[:, half:]], 1)}


@pytest.mark.parametrize("family", [f if f in CORE else pytest.param(f, marks=pytest.mark.slow) for f in SETTINGS])
@pytest.mark.parametrize("stack", STACKS)
def test_layers_of_a_stack_leave(family: str, stack: Stack, ids: torch.Tensor, tmp_path: Path) -> None:
    deeper = {"num_layers": LAYERS + 2} if stack == "encoder" and "num_layers" in SETTINGS[family] else {}
    model = make(family, **deeper)
    handle = wrap(model, stack=stack)
    other = stack_structure(model, "decoder" if stack == "encoder" else "encoder")
    removed = rank(handle, ids, protect=[0]).plan(2).remove
    pruned = remove_layers(handle, removed)
    report = verify_removal(handle, pruned, removed, ids)
    assert report.passed, f"\n{report}"
    assert "cached decoding" in [check.name for check in report.checks]
    pruned.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert stack_structure(again, stack).num_layers == handle.structure.num_layers - 2
    assert stack_structure(again, other.stack or stack).num_layers == LAYERS
    with torch.no_grad():
        torch.testing.assert_close(again(**given(ids)).logits, pruned(**given(ids)).logits)
    tokens = [
        again.generate(ids[:, :6], do_sample=False, min_new_tokens=8, max_new_tokens=8, use_cache=cached).tolist()
        for cached in (True, False)
    ]
    assert tokens[0] == tokens[1]
    layers = stack_structure(pruned, stack).layers
    layers[0].load_state_dict(stack_structure(model, stack).layers[removed[0]].state_dict(), strict=False)
    assert not verify_removal(handle, pruned, removed, ids).passed


@pytest.mark.parametrize("family", FIRST_STAYS)
@pytest.mark.parametrize("stack", STACKS)
def test_the_layer_with_the_position_bias_stays(family: str, stack: Stack) -> None:
    with pytest.raises(LyapunovPruneError, match="keep layer 0"):
        remove_layers(wrap(make(family), stack=stack), [0])


@pytest.mark.parametrize("family", FIRST_STAYS)
def test_without_its_entry_the_gate_refuses(family: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests/families/test_faults.py: the position bias of the first layer is lost without a word."""
    handle = wrap(make(family), stack="decoder")
    monkeypatch.delitem(FAMILIES, handle.structure.model_type)
    with pytest.raises(LyapunovPruneError):
        remove_layers(handle, [0])


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_the_encoder_of_t5_gets_no_shorter_than_its_decoder(family: str, ids: torch.Tensor) -> None:
    """transformers sizes the cache of `generate` by the encoder."""
    model = make(family)
    with pytest.raises(LyapunovPruneError, match="remove layers of the decoder first"):
        remove_layers(wrap(model, stack="encoder"), [1])
    short = remove_layers(wrap(model, stack="decoder"), [1])
    shorter = remove_layers(wrap(short, stack="encoder"), [1])
    assert (shorter.config.num_layers, shorter.config.num_decoder_layers) == (LAYERS - 1, LAYERS - 1)
    assert shorter.generate(ids[:, :6], max_new_tokens=4, min_new_tokens=4).shape[1] == 5


@pytest.mark.parametrize("what", ["attention", "mlp"])
def test_parts_of_an_encoder_leave_and_another_part_fails_the_gate(what: str, ids: torch.Tensor) -> None:
    handle = wrap(make("bart"), stack="encoder")
    plan = rank(handle, ids, what=what, criterion="bi").plan(1)
    (layer,) = plan.drop_attention + plan.drop_mlp
    pruned = remove_layers(handle, plan)
    assert verify_removal(handle, pruned, plan, ids).passed
    field: dict[str, Any] = {f"drop_{what}": ((layer + 1) % LAYERS,)}
    other = PruningPlan.given(handle, **field)
    assert not verify_removal(handle, remove_layers(handle, other), plan, ids).passed


@pytest.mark.parametrize(
    ("family", "stack", "what", "why"),
    [
        ("bart", "decoder", "mlp", "3 parts with matrices .*encoder_attn"),
        ("t5", "encoder", "attention", "adds to the state itself"),
        ("switch_transformers", "decoder", "mlp", "adds to the state itself"),
        ("switch_transformers", "encoder", "experts", "causal decoder"),
    ],
)
def test_parts_that_cannot_leave_a_stack_alone(
    family: str, stack: Stack, what: str, why: str, ids: torch.Tensor
) -> None:
    handle = wrap(make(family), stack=stack)
    with pytest.raises(LyapunovPruneError, match=why):
        rank(handle, ids, what=what, criterion="frequency" if what == "experts" else "bi")


# References in float64, by hooks of their own on forwards of the whole model.


def _states(model: PreTrainedModel, layers: nn.ModuleList, ids: torch.Tensor, moved: Any = None) -> list[torch.Tensor]:
    """The state before the first of `layers`, which `moved` changes, and behind each of them."""
    found: list[torch.Tensor] = []

    def first(module: nn.Module, args: Any, kwargs: Any) -> Any:
        h = args[0] if args else kwargs["hidden_states"]
        h = h if moved is None else moved(h)
        found.append(h)
        return ((h, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": h})

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found.append(output if isinstance(output, torch.Tensor) else output[0])

    with torch.no_grad(), hooked(before=[(layers[0], first)], after=[(layer, after) for layer in layers]):
        model(**given(ids))
    return found


@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize("stack", STACKS)
def test_rho_and_influence_are_those_of_a_float64_reference(family: str, stack: Stack, ids: torch.Tensor) -> None:
    model = make(family).double()
    handle, ids = wrap(model, stack=stack), ids[:1]
    clean = _states(model, handle.layers, ids)
    error = [
        b - a
        for a, b in zip(clean, _states(model, handle.layers, ids, lambda h: h + 0.01 * direction(h, 0, 0)), strict=True)
    ]
    V = np.array([float(e.square().sum() / h.square().sum()) for e, h in zip(error, clean, strict=True)])
    found = measure_contraction(handle, ids, seeds=(0,))
    np.testing.assert_allclose(found.rho, V[1:] / V[:-1], rtol=1e-6)
    turn = [1 - torch.cosine_similarity(a, b, dim=-1).mean().item() for a, b in pairwise(clean)]
    np.testing.assert_allclose(block_influence(handle, ids).influence, turn, rtol=1e-6)
    assert found.measured_on.model.stack == stack
    assert f"the {stack} of" in found.measured_on.line()


@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize("stack", STACKS)
def test_kl_is_that_of_a_float64_reference(family: str, stack: Stack, ids: torch.Tensor) -> None:
    model = make(family).double()
    handle = wrap(model, stack=stack)

    def skipping(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        h = args[0] if args else kwargs["hidden_states"]
        return h if isinstance(output, torch.Tensor) else (h, *output[1:])

    def log_p() -> torch.Tensor:
        with torch.no_grad():
            return model(**given(ids)).logits[:, :-1].log_softmax(-1)

    dense, wanted = log_p(), []
    for layer in handle.layers:
        with hooked(after=[(layer, skipping)]):
            q = log_p()
        wanted.append(float((dense.exp() * (dense - q)).sum(-1).mean()))
    np.testing.assert_allclose(skip_divergence(handle, ids).kl, wanted, rtol=1e-6)


# What is refused.


def test_a_plan_is_for_one_stack(ids: torch.Tensor) -> None:
    model = make()
    encoder, decoder = (wrap(model, stack=stack) for stack in STACKS)
    plan = PruningPlan.given(encoder, [1])
    assert "of the encoder of" in plan.sentence()
    with pytest.raises(LyapunovPruneError, match="not of the decoder of"):
        remove_layers(decoder, plan)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, ids: wrap(model),
        perplexity,
        check_bounds,
        lambda model, ids: mend(model, [1], ids),
        lambda model, ids: compress(model, ids, method="magnitude", sparsity=0.5),
        lambda model, ids: rank(model, ids, criterion="best", remove=1),
    ],
)
def test_what_needs_a_causal_decoder_says_so(call: Any, ids: torch.Tensor) -> None:
    model = make()
    with pytest.raises(LyapunovPruneError, match="encoder-decoder"):
        call(model, ids)
    with pytest.raises(LyapunovPruneError, match=r"causal decoder|next token"):
        call(wrap(model, stack="decoder"), ids)


def _without_start() -> Decoder:
    model = make()
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    return wrap(model, stack="decoder")


@pytest.mark.parametrize(
    ("handle", "why"),
    [
        (lambda tiny: wrap(tiny("llama"), stack="encoder"), "leave out stack"),
        (lambda tiny: wrap(make("t5").encoder, stack="encoder"), "leave out stack|AutoModelForSeq2SeqLM"),
        (lambda tiny: wrap(transformers.T5Model(make("t5").config), stack="encoder"), "AutoModelForSeq2SeqLM"),
        (lambda tiny: _without_start(), "decoder_start_token_id"),
    ],
    ids=["one stack", "half a model", "no head", "no start token"],
)
def test_no_stack_is_made_of(handle: Any, why: str, tiny: Any, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match=why):
        block_influence(handle(tiny), ids)


# From files.


@pytest.fixture
def saved(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    make(vocab_size=len(tokenizer), num_layers=LAYERS + 1).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    return str(tmp_path / "t5")


@pytest.mark.parametrize("stack", STACKS)
def test_commands_take_a_stack(stack: Stack, saved: str, tmp_path: Path, run: Callable[..., Done]) -> None:
    some = ["--stack", stack, "--tokens", "64", "--context", "16"]
    for command, *options in (
        ["profile"],
        ["rank", "--remove", "1", "--protect", "0"],
        ["prune", "--remove", "1", "--protect", "0"],
    ):
        done = run(command, saved, *options, *some, "-o", str(tmp_path / command))
        assert done.code == 0, done
    pruned = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "prune")
    left = [stack_structure(pruned, each).num_layers for each in STACKS]
    assert left == [LAYERS + 1 - (stack == "encoder"), LAYERS - (stack == "decoder")]
    assert f"layers of its {stack}" in (tmp_path / "prune" / "README.md").read_text()


def test_commands_ask_for_a_stack(saved: str, checkpoint: Path, run_bad: Callable[..., str]) -> None:
    some = ("--tokens", "64", "--context", "16")
    assert "--stack" in run_bad("profile", saved, *some)
    assert "--stack" in run_bad("eval", saved, *some)
    assert "--stack" in run_bad("profile", str(checkpoint), "--stack", "encoder", *some)
    assert "--stack" in run_bad("prune", saved, "--stack", "encoder", "--layers", "1", "--device", "disk", "-o", "out")
    mended = ("--stack", "decoder", "--layers", "1", "--mend", "--text", "builtin", *some, "-o", "out")
    assert "causal decoder" in run_bad("prune", saved, *mended)
