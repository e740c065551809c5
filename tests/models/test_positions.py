"""Every loop that decodes or scores step by step, across the length at which a config switches.

Held against plain forwards without a cache in float64, each over the text up to the step: rotary frequencies that
change (longrope), sliding windows and chunks of attention. What dynamic NTK would change lies beyond the context.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SMALL, VOCABULARY, make_tokenizer
from scipy.special import rel_entr
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lyapunov_prune import LyapunovPruneError, remove_layers
from lyapunov_prune.data import ChoiceItem
from lyapunov_prune.evaluation import harness, harness_tasks
from lyapunov_prune.evaluation.speed import measure_speed
from lyapunov_prune.evaluation.tasks import load_tasks
from lyapunov_prune.forward.decoding import continued
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.logits import cached_logits, deviation, last_logits
from lyapunov_prune.forward.own_text import self_generated
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.positions import alike, rotation, stretches, switches
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.predictions.choices import compare_choices
from lyapunov_prune.predictions.generation import compare_generation
from lyapunov_prune.predictions.hierarchy import probe_layers
from lyapunov_prune.predictions.history import history_divergence
from lyapunov_prune.pruning.gate import Gate

SWITCH, PROMPT, STEPS = 32, 26, 12
V = len(VOCABULARY)
SIZES = {"vocab_size": V, "num_hidden_layers": 3}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 9.0, 16.0, 30.0],
    "original_max_position_embeddings": SWITCH,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH}),
    # Families whose `generate` does not know of the switch, and one that scales the rotation beside it.
    "longrope-llama": ("llama", {"rope_parameters": LONGROPE}),
    "longrope-scaled": (
        "phimoe",
        {
            "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4},
            "original_max_position_embeddings": SWITCH,
            **MOE,
        },
    ),
    "sliding": ("mistral", {"sliding_window": SWITCH}),
    "sliding-and-full": ("gemma3_text", {"sliding_window": SWITCH, "sliding_window_pattern": 2}),
    "chunked": (
        "llama4_text",
        {"attention_chunk_size": SWITCH, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, **MOE},
    ),
}
OWN_SWITCH = ("longrope", "longrope-scaled")  # `generate` reads the text again by itself


def made(model_type: str, changes: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    return model.double()


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(kind: str) -> PreTrainedModel:
    return made(*KINDS[kind])


@pytest.fixture
def other(model: PreTrainedModel) -> PreTrainedModel:
    return remove_layers(model, [1])


@pytest.fixture
def prompts() -> torch.Tensor:
    return torch.randint(3, V, (2, PROMPT), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def plain(model: PreTrainedModel, text: torch.Tensor) -> torch.Tensor:
    """The logits behind a text (windows × vocabulary), of a forward over it and no more."""
    return model(text, use_cache=False).logits[:, -1]


def extended(model: PreTrainedModel, text: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    for _ in range(steps):
        text = torch.cat([text, plain(model, text).argmax(-1, keepdim=True)], dim=1)
    return text


def log_p(model: PreTrainedModel, text: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """Of the last `steps` tokens of a text what was predicted for each (windows × steps × vocabulary), float64."""
    ends = range(text.shape[1] - steps, text.shape[1])
    return torch.stack([plain(model, text[:, :end]) for end in ends], dim=1).log_softmax(-1)


def kl(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Mean over the windows of `KL(p‖q)` at every step."""
    return rel_entr(a.exp().numpy(), b.exp().numpy()).sum(-1).mean(0)


@torch.no_grad()
def test_the_switch_is_one(kind: str, model: PreTrainedModel, prompts: torch.Tensor) -> None:
    """What lies behind the switch is no continuation of what lies before it, or these tests would see nothing."""
    text = extended(model, prompts)
    before = model(text[:, :SWITCH], use_cache=False).logits
    after = model(text, use_cache=False).logits[:, :SWITCH]
    assert (deviation(after, before) > 1e-3) == kind.startswith("longrope")


def test_greedy_text(kind: str, model: PreTrainedModel, prompts: torch.Tensor) -> None:
    wanted = extended(model, prompts)[:, PROMPT:]
    assert torch.equal(continued(read(wrap(model), prompts), prompts, STEPS), wanted)
    if kind in OWN_SWITCH or not kind.startswith("longrope"):
        mask = torch.ones_like(prompts)
        own = model.generate(prompts, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)[:, PROMPT:]
        assert torch.equal(own, wanted)


def test_self_generated_text(model: PreTrainedModel) -> None:
    text = self_generated(model, tokens=2 * (SWITCH + 8), context=SWITCH + 8, seed=3).ids
    for window, row in enumerate(text):
        draws = np.random.default_rng((3, window)).random(SWITCH + 7)
        for t in range(SWITCH - 4, SWITCH + 7):
            reached = plain(model, row[None, : t + 1])[0].softmax(-1).cumsum(-1)
            assert row[t + 1] == int((reached <= draws[t]).sum())


@pytest.mark.parametrize("positions", [False, True])
def test_cached_logits(model: PreTrainedModel, prompts: torch.Tensor, positions: bool) -> None:
    ids = extended(model, prompts, 10)
    wanted = log_p(model, torch.cat([ids, ids[:, :1]], 1), 9)
    with torch.no_grad():
        for found in (cached_logits(model, ids, positions=positions), last_logits(model, ids)):
            assert found is not None
            torch.testing.assert_close(found.log_softmax(-1), wanted, rtol=0, atol=1e-5)


def test_the_gate(model: PreTrainedModel, other: PreTrainedModel, prompts: torch.Tensor) -> None:
    with torch.no_grad():
        assert (
            Gate(wrap(model), wrap(other), [extended(other, prompts, 10)], lambda decoder: nullcontext())
            .cached()
            .passed
        )


def test_generation(model: PreTrainedModel, other: PreTrainedModel, prompts: torch.Tensor) -> None:
    found = compare_generation(model, other, prompts, steps=STEPS)
    texts = [extended(m, prompts) for m in (model, other)]
    assert [found.dense_tokens, found.compressed_tokens] == [
        tuple(map(tuple, text[:, PROMPT:].tolist())) for text in texts
    ]
    np.testing.assert_allclose(found.kl, kl(*map(log_p, (model, other), texts)), rtol=1e-5, atol=1e-9)


def test_history(model: PreTrainedModel, other: PreTrainedModel, prompts: torch.Tensor) -> None:
    found = history_divergence(model, other, prompts, steps=STEPS)
    texts = [extended(m, prompts) for m in (model, other)]
    p = log_p(model, texts[0])
    for row, text in enumerate(texts):
        np.testing.assert_allclose(found.kl[row], kl(p, log_p(other, text)), rtol=1e-5, atol=1e-9)


def test_hierarchy(model: PreTrainedModel, prompts: torch.Tensor) -> None:
    """Without the last layer the rest is a forward of its own, which can be held against."""
    found = probe_layers(model, prompts, steps=STEPS, what=("layer",), batch_size=2)
    text, last = extended(model, prompts), len(find_structure(model).layers) - 1
    p = log_p(model, text)
    with skipped(find_structure(model), (last,)):
        q = log_p(model, text)
    np.testing.assert_allclose(found.kl[0, last], kl(p, q), rtol=1e-5, atol=1e-9)
    assert not found.violations


def scores(model: PreTrainedModel, texts: list[list[int]], shared: int) -> list[float]:
    """`Σ log p` of each text's tokens behind the first `shared`, from one forward over what stands before the last."""
    found = []
    for text in texts:
        z = model(torch.tensor([text[:-1]]), use_cache=False).logits[0].log_softmax(-1)
        found.append(float(z[range(shared - 1, len(text) - 1), text[shared:]].sum()))
    return found


# Choices behind one beginning that end on both sides of the switch, one of them exactly there.
LENGTHS = (SWITCH - 2, SWITCH + 1, SWITCH + 2, SWITCH + 9)


def item() -> ChoiceItem:
    """Its choices begin with the space behind the query."""
    return ChoiceItem("q" * (PROMPT - 1), tuple("abcd"[k] * (n - PROMPT) for k, n in enumerate(LENGTHS)), 0)


def test_choices(model: PreTrainedModel, other: PreTrainedModel) -> None:
    found = compare_choices(model, other, [item()], make_tokenizer())
    texts = [make_tokenizer()(item().stem + choice)["input_ids"] for choice in item().choices]
    with torch.no_grad():
        for model_, of in ((model, found.dense), (other, found.compressed)):
            np.testing.assert_allclose(of[0], scores(model_, texts, PROMPT - 1), rtol=1e-6)
    p, q = (plain(m, torch.tensor([texts[0][: PROMPT - 1]])).log_softmax(-1)[None] for m in (model, other))
    np.testing.assert_allclose(found.kl, kl(p, q), rtol=1e-6)


def test_items_and_answers_of_a_task(
    kind: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(harness_tasks._GENERATION["generation_kwargs"], "max_gen_toks", STEPS)
    tokenizer = make_tokenizer()
    model.generation_config.eos_token_id = 2
    choices, questions = tmp_path / "choices.jsonl", tmp_path / "questions.jsonl"
    choices.write_text(json.dumps({"query": item().query, "choices": item().choices, "gold": 0}))
    asked = ["w" * 10, "why", "h" * 30]  # padded, the shorter ones would be rotated as the longest
    questions.write_text("".join(json.dumps({"question": q, "answer": "#### 1"}) + "\n" for q in asked))
    tasks = load_tasks([choices, questions])
    objects = {task.name: task.harness for task in tasks}
    before = dict(vars(model))
    found, _ = harness.run(model, tokenizer, objects, limit=None, bos=False, batch_size=3)
    texts = [tokenizer(item().stem + choice)["input_ids"] for choice in item().choices]
    told = [answer[0][0] for answer in found["samples"]["choices"][0]["resps"]]
    with torch.no_grad():
        np.testing.assert_allclose(told, scores(model, texts, PROMPT - 1), rtol=1e-4)
    answers = {sample["doc_id"]: sample["resps"][0][0] for sample in found["samples"]["questions"]}
    for i, q in enumerate(asked):
        ids = torch.tensor([tokenizer(f"Question: {q}\nAnswer:")["input_ids"]])
        tokens = extended(model, ids)[0, ids.shape[1] :].tolist()
        tokens = tokens[: tokens.index(2)] if 2 in tokens else tokens
        assert answers[i] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert vars(model).keys() == before.keys()


def test_texts_of_one_rotation() -> None:
    config, plain_one = SimpleNamespace(rope_parameters=LONGROPE), SimpleNamespace()
    assert switches(config) == (SWITCH,)
    assert [rotation(config, n) for n in (1, SWITCH, SWITCH + 1, 128)] == [0, 0, 1, 1]
    assert stretches(config, PROMPT, PROMPT + STEPS) == [(PROMPT, SWITCH), (SWITCH + 1, PROMPT + STEPS)]
    assert stretches(config, SWITCH + 1, 80) == [(SWITCH + 1, 80)]
    assert alike(config, [70, SWITCH, 80, 10]) == [[3, 1], [0, 2]]
    by_type = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10.0}}
    assert switches(AutoConfig.for_model("modernbert-decoder", rope_parameters=by_type)) == (SWITCH,)
    assert switches(plain_one) == ()
    assert alike(plain_one, [70, 64, 80]) == [[1, 0, 2]]


def test_dynamic_ntk_begins_where_the_context_ends(prompts: torch.Tensor) -> None:
    """It rotates by the plain frequencies up to the longest context, and beyond every loop refuses."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = made("llama", {"rope_parameters": rope, "max_position_embeddings": SWITCH})
    steps = SWITCH - PROMPT
    wanted = extended(model, prompts, steps)[:, PROMPT:]
    assert torch.equal(continued(read(wrap(model), prompts), prompts, steps), wanted)
    asked: list[Callable[[], Any]] = [
        lambda: self_generated(model, tokens=SWITCH + 1, context=SWITCH + 1),
        lambda: compare_generation(model, model, prompts, steps=STEPS),
        lambda: history_divergence(model, model, prompts, steps=STEPS),
        lambda: probe_layers(model, prompts, steps=STEPS),
        lambda: compare_choices(model, model, [item()], make_tokenizer()),
        lambda: measure_speed({"tiny": model}, prompt=PROMPT, steps=STEPS),
    ]
    for ask in asked:
        with pytest.raises(LyapunovPruneError, match=f"{SWITCH}"):
            ask()
