"""Two models that write, against a float64 loop that reads the whole text again at every step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SMALL, hooks_of, make_tiny
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from lyapunov_prune import LyapunovPruneError, NonFiniteError, compare_generation, remove_layers
from lyapunov_prune.evaluation.repetition import collapsed, repetition
from lyapunov_prune.predictions import GenerationDivergence
from lyapunov_prune.predictions import generation as module

STEPS = 8
MEASURES = ("state_similarity", "logit_similarity", "probability_similarity", "kl")
LAST = {"llama": "model.layers.5", "gpt2": "transformer.h.5"}


@pytest.fixture
def prompts(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, :9]


def shaken(model: PreTrainedModel, size: float = 0.02) -> PreTrainedModel:
    """A copy with noise on every matrix."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.ndim == 2:
                weight += size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return other


def ending_with(model: PreTrainedModel, *tokens: int) -> PreTrainedModel:
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = list(tokens)  # type: ignore[union-attr]
    return model


def likeliest(step: int, z: np.ndarray) -> int:
    return int(z.argmax())


@torch.no_grad()
def written(
    model: PreTrainedModel, last: str, prompt: torch.Tensor, choose: Callable[[int, np.ndarray], int] = likeliest
) -> list[tuple[np.ndarray, np.ndarray]]:
    """What leaves the module `last` and the logits, of one prompt, at every step, in float64 and without a cache."""
    twin, text, found = copy.deepcopy(model).double(), prompt[None], []
    states: list[Any] = []
    handle = twin.get_submodule(last).register_forward_hook(lambda m, args, output: states.append(output))
    for t in range(STEPS):
        z = twin(text, use_cache=False).logits[0, -1]
        state = states.pop()
        found.append(((state if isinstance(state, torch.Tensor) else state[0])[0, -1].numpy(), z.numpy()))
        text = torch.cat([text, torch.tensor([[choose(t, z.numpy())]])], 1)
    handle.remove()
    return found


def cos(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def by_definition(first: list[Any], second: list[Any], T: float) -> np.ndarray:
    """The four measures of one prompt, steps × 4."""
    rows = []
    for (h, z), (h2, z2) in zip(first, second, strict=True):
        p, q = softmax(z / T), softmax(z2 / T)
        rows.append([cos(h, h2), cos(z, z2), cos(p, q), rel_entr(p, q).sum()])
    return np.array(rows)


def exact(
    dense: PreTrainedModel, other: PreTrainedModel, lasts: tuple[str, str], prompts: torch.Tensor, T: float = 1.0
) -> tuple[np.ndarray, list[list[int]], list[list[int]]]:
    """Measures, prompts × steps × 4, and both texts."""
    runs = [[written(model, last, row) for row in prompts] for model, last in zip((dense, other), lasts, strict=True)]
    texts = [[[int(z.argmax()) for _, z in run] for run in rows] for rows in runs]
    return np.array([by_definition(a, b, T) for a, b in zip(*runs, strict=True)]), texts[0], texts[1]


def assert_agree(found: GenerationDivergence, wanted: np.ndarray, rtol: float) -> None:
    for name, values in zip(MEASURES, wanted.T, strict=True):
        np.testing.assert_allclose(getattr(found, name), values, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize(("name", "T"), [("llama", 1.0), ("gpt2", 2.0)])
def test_measures_are_the_definitions(name: str, T: float, prompts: torch.Tensor) -> None:
    dense = ending_with(make_tiny(name).double())  # with nothing
    other = shaken(dense)
    found = compare_generation(dense, other, prompts, steps=STEPS, temperature=T, batch_size=2)
    wanted, first, second = exact(dense, other, (LAST[name], LAST[name]), prompts, T)
    assert_agree(found, wanted.mean(0), 1e-9)
    assert [list(t) for t in found.dense_tokens] == first
    assert [list(t) for t in found.compressed_tokens] == second
    assert first != second  # each went on from its own tokens
    assert found.temperature == T
    assert (found.running == 1).all()
    assert hooks_of(dense) == hooks_of(other) == 0


@pytest.mark.parametrize("T", [1.0, 0.5])
def test_sampled_tokens_are_those_that_the_same_draws_fall_on(T: float, prompts: torch.Tensor) -> None:
    dense = ending_with(make_tiny("llama").double())
    other = shaken(dense, 0.2)
    found = compare_generation(dense, other, prompts, steps=STEPS, temperature=T, seed=5, batch_size=2)
    texts: dict[str, list[list[int]]] = {"dense": [], "other": []}
    measures = []
    for i, row in enumerate(prompts):
        draws = np.random.default_rng((5, i)).random(STEPS)
        runs = {}
        for name, model in (("dense", dense), ("other", other)):
            text: list[int] = []
            texts[name].append(text)

            def choose(t: int, z: np.ndarray, text: list[int] = text, draws: np.ndarray = draws) -> int:
                text.append(next(v for v, reached in enumerate(np.cumsum(softmax(z / T))) if reached > draws[t]))
                return text[-1]

            runs[name] = written(model, LAST["llama"], row, choose)
        measures.append(by_definition(runs["dense"], runs["other"], T))
    assert [list(t) for t in found.dense_tokens] == texts["dense"] != texts["other"]
    assert [list(t) for t in found.compressed_tokens] == texts["other"]
    assert_agree(found, np.mean(measures, 0), 1e-9)
    assert "Decoding with draws of seed 5" in str(found)
    greedy = compare_generation(dense, other, prompts, steps=STEPS, temperature=T)
    assert found.dense_tokens != greedy.dense_tokens
    assert greedy.measured_on.seed is None


def test_equal_models_draw_one_text(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    found = compare_generation(llama, llama, prompts, steps=STEPS, seed=0)
    assert found.first_difference == (STEPS,) * len(prompts)
    with pytest.raises(LyapunovPruneError, match="seed"):
        compare_generation(llama, llama, prompts, steps=STEPS, seed=-1)


def test_a_pruned_model_has_fewer_layers(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    pruned = remove_layers(llama, [1, 4])
    found = compare_generation(ending_with(llama), pruned, prompts, steps=STEPS)
    wanted, first, second = exact(llama, pruned, ("model.layers.5", "model.layers.3"), prompts)
    assert_agree(found, wanted.mean(0), 1e-4)
    assert [[list(t) for t in texts] for texts in (found.dense_tokens, found.compressed_tokens)] == [first, second]
    differing = [[x != y for x, y in zip(a, b, strict=True)] for a, b in zip(first, second, strict=True)]
    assert found.first_difference == tuple([*row, True].index(True) for row in differing)
    agreed = [np.mean([not any(row[: t + 1]) for row in differing]) for t in range(STEPS)]
    np.testing.assert_array_equal(found.same_text, agreed)
    assert found.compressed.num_layers == 4


def test_a_model_does_not_part_from_itself(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    found = compare_generation(llama, llama, prompts, steps=STEPS)
    for name in MEASURES[:3]:
        assert (getattr(found, name) == 1).all()
    assert (found.kl == 0).all()
    assert found.first_difference == (STEPS,) * len(prompts)
    assert (found.same_text == 1).all()


def test_batches_do_not_matter(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    other = shaken(llama)
    one, all_ = (compare_generation(llama, other, prompts, steps=STEPS, batch_size=n) for n in (1, 3))
    assert (one.dense_tokens, one.compressed_tokens) == (all_.dense_tokens, all_.compressed_tokens)
    assert_agree(one, np.stack([getattr(all_, name) for name in MEASURES], -1), 1e-4)


def test_another_width_has_no_similarity_of_states(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    found = compare_generation(llama, make_tiny("llama", hidden_size=48), prompts, steps=3)
    assert np.isnan(found.state_similarity).all()
    assert np.isfinite(found.logit_similarity).all()


def test_texts_end_and_leave_the_means(prompts: torch.Tensor) -> None:
    """Each at its own end: a prompt counts up to and including the step at which one of its texts ends."""
    dense = make_tiny("llama").double()
    other = shaken(dense)
    wanted, first, second = exact(dense, other, (LAST["llama"],) * 2, prompts)
    ends = (first[0][2], second[1][4])
    found = compare_generation(ending_with(dense, *ends), other, prompts, steps=STEPS)

    def cut(text: list[int]) -> tuple[int, ...]:
        return tuple(text[: next((t for t, x in enumerate(text) if x in ends), STEPS)])

    assert found.dense_tokens == tuple(map(cut, first))
    assert found.compressed_tokens == tuple(map(cut, second))
    last = [min(len(cut(a)), len(cut(b))) for a, b in zip(first, second, strict=True)]
    inside = np.array([[t <= end for t in range(STEPS)] for end in last])
    np.testing.assert_array_equal(found.running, inside.mean(0))
    assert 0 < found.running.min() < 1 or np.isnan(found.kl[found.running == 0]).all()
    for t in range(STEPS):
        if inside[:, t].any():
            np.testing.assert_allclose(found.kl[t], wanted[inside[:, t], t, 3].mean(), rtol=1e-9)
    for a, b, at in zip(found.dense_tokens, found.compressed_tokens, found.first_difference, strict=True):
        assert at == (STEPS if a == b else next(t for t in range(STEPS) if a[t : t + 1] != b[t : t + 1]))


def test_texts_differ_where_one_goes_on(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    found = compare_generation(llama, llama, prompts, steps=3)
    texts: Any = {"dense_tokens": ((4, 5), (4,), (), ()), "compressed_tokens": ((4, 5, 6), (4,), (), (4,))}
    found = replace(found, **texts)
    assert found.first_difference == (2, 3, 3, 0)
    assert found.kept.tolist() == [2 / 3, 1, 1, 0]
    more = replace(found, dense_tokens=((4,), (4,), (4,), (4, 5)), compressed_tokens=((4, 5), (), (5,), (4, 5)))
    assert more.kept.tolist() == [1 / 2, 0, 0, 1]  # the end of a text is written too
    assert found.same_text.tolist() == [0.75, 0.75, 0.5]


def test_no_step_is_decoded_when_all_texts_have_ended(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    model = ending_with(llama, *range(97))
    found = compare_generation(model, model, prompts, steps=STEPS)
    assert found.dense_tokens == ((),) * len(prompts)
    assert found.running.tolist() == [1] + [0] * (STEPS - 1)
    assert np.isnan(found.kl[1:]).all()
    assert found.first_difference == (STEPS,) * len(prompts)
    assert "0% and 0% of 3-grams" in str(found)


def test_logits_are_of_one_step_at_a_time(prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_tiny("llama")
    monkeypatch.setattr(module, "_told_positions", lambda model: False)
    lengths: list[int] = []
    model.lm_head.register_forward_hook(lambda m, args, output: lengths.append(output.shape[1]))
    read: list[int] = []
    model.model.register_forward_hook(lambda m, args, output: read.append(output[0].shape[1]))
    compare_generation(model, make_tiny("llama", seed=1), prompts, steps=STEPS)
    assert lengths == [1] * STEPS
    assert read == [prompts.shape[1]] + [1] * (STEPS - 1)


def test_a_decoder_without_a_cache_reads_its_text_again(prompts: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("openai-gpt", **SMALL, n_layer=6)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.3)
    model = model.double()
    other = shaken(model, 0.05)
    found = compare_generation(model, other, prompts, steps=STEPS)
    wanted, first, _ = exact(model, other, ("transformer.h.5",) * 2, prompts)
    assert_agree(found, wanted.mean(0), 1e-9)
    assert [list(t) for t in found.dense_tokens] == first


class Counting(LlamaForCausalLM):
    """Counts its positions from zero at every call, unless it is told them."""

    def forward(self, input_ids: Any, past_key_values: Any = None, position_ids: Any = None, **given: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, past_key_values=past_key_values, position_ids=position_ids, **given)


def test_a_decoder_that_must_be_told_its_positions_is(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    other = copy.deepcopy(llama)
    other.__class__ = Counting
    found = compare_generation(llama, other, prompts, steps=STEPS)
    assert found.first_difference == (STEPS,) * len(prompts)
    np.testing.assert_allclose(found.kl, 0, atol=1e-9)


def test_a_cache_that_is_wrong_is_refused(prompts: torch.Tensor) -> None:
    model: Any = make_tiny("llama")

    def forget(layer: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0]
        return ((hidden * 3 if hidden.shape[1] == 1 else hidden, *args[1:]), kwargs)

    model.model.layers[2].register_forward_pre_hook(forget, with_kwargs=True)
    with pytest.raises(LyapunovPruneError, match="its cache"):
        compare_generation(make_tiny("llama"), model, prompts, steps=2)


# What is measured of a text.


@given(st.lists(st.integers(0, 4), max_size=24).map(tuple), st.integers(1, 4))
def test_repetition_counts_the_ngrams_that_were_there_before(text: tuple[int, ...], n: int) -> None:
    seen, again, count = set(), 0, 0
    for i in range(n, len(text) + 1):
        gram = text[i - n : i]
        again, count = again + (gram in seen), count + 1
        seen.add(gram)
    assert repetition(text, n) == pytest.approx(again / count if count else 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ((1, 2, 3, 7, 7, 7, 7), True),
        ((1, 2, 3, 7, 7, 7), False),  # three times only
        ((7, 7, 7, 7, 1), False),  # it went on
        ((9, *(1, 2, 3) * 4), True),
        (tuple(range(8)) * 4, True),
        (tuple(range(9)) * 5, False),  # a cycle of nine
        ((), False),
        ((5,) * 3, False),
    ],
)
def test_a_text_has_collapsed_when_it_ends_in_a_cycle(text: tuple[int, ...], says: bool) -> None:
    assert collapsed(text) is says


# Bad input.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"steps": 120}, "9 and 120 more .*128"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    changes: dict[str, Any], message: str, llama: PreTrainedModel, prompts: torch.Tensor
) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        compare_generation(llama, llama, prompts, **{"steps": 2, **changes})


def test_two_vocabularies_are_refused(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="vocabularies of 97 and 120"):
        compare_generation(llama, make_tiny("llama", vocab_size=120), prompts, steps=2)


def test_a_model_that_is_not_finite_is_named_by_its_layer(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="output of layer 2"):
        compare_generation(llama, model, prompts, steps=2)


def test_prints_a_few_steps_and_comes_back_from_its_file(
    llama: PreTrainedModel, prompts: torch.Tensor, tmp_path: Path
) -> None:
    found = compare_generation(llama, shaken(llama), prompts, steps=11)
    assert found.summary()["step"].tolist() == [0, 1, 2, 4, 8, 10]
    again = GenerationDivergence.load(found.save(tmp_path / "g.json"))
    assert str(again) == str(found)
    assert all(a >= b for a, b in pairwise(found.same_text))
