"""End to end on the real built-in model."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import judge_briefly
from helpers.forked import FORKED

from lyapunov_prune import block_influence, measure_contraction, perplexity
from lyapunov_prune.cli import demo as demo_module
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.healing import state as training_state
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.loading import load
from lyapunov_prune.profiles import profile as profile_module
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.results.files import folder_digest
from lyapunov_prune.shrinking import texts
from lyapunov_prune.shrinking.report import Shrinking

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("lyapunov_prune")]
with torch.no_grad():
    torch.save(model(torch.load("ids.pt")).logits, "logits.pt")
"""


# Whose folder `small` is.


def demo_of(loaded: Decoder, patch: pytest.MonkeyPatch, run: Path, tokens: int = 32 * 24) -> Path:
    """The demo in `run`, on a tiny model."""
    patch.setattr(demo_module, "load", lambda name: loaded)
    patch.setattr(demo_module, "SEARCH", 8.0)
    patch.setattr(demo_module, "STEPS", 2)
    patch.setattr(texts, "EVALUATED", 512)
    judge_briefly(patch, context=24)
    demo_module.run_demo(run, tokens=tokens, context=24, show=lambda *_: None)
    return run / "small"


@pytest.fixture(scope="session")
def loaded(_saved_checkpoint: Path) -> Decoder:
    return load(_saved_checkpoint)


@pytest.fixture(scope="session")
def _first(loaded: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        return demo_of(loaded, patch, tmp_path_factory.mktemp("first") / "run").parent


@pytest.fixture
def tiny_demo(loaded: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    return functools.partial(demo_of, loaded, monkeypatch, tmp_path / "run")


@pytest.fixture
def small(_first: Path, checkpoint: Path) -> Path:
    """What the demo has left in `run`, with the times that its record knows."""
    return Path(shutil.copytree(_first, checkpoint.parent / "run")) / "small"


UNLOADED: Any = None  # whatever a demo would do with it fails


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_demo_replaces_the_checkpoint_of_an_earlier_one(small: Path, tiny_demo: Callable[..., Path]) -> None:
    first, record = weights(small), small.parent / "small.fingerprint"
    names = {path.name for path in small.parent.iterdir()}
    results = {f"{name}.json" for name in ("profile", "shrink", "best", "eval")}
    assert names == results | {"report.html", "figures", "small", "small.fingerprint"}
    kept, page = record.read_text(), (small.parent / "report.html").read_text()
    assert all(f"perplexity, {text}" in page for text in ("builtin", "code"))  # like the text learnt from, and foreign
    assert "of a kind that no step has seen" in page
    tiny_demo()
    assert record.read_text() == kept == f"{folder_digest(small)}\n"
    shutil.rmtree(small)
    tiny_demo()
    assert weights(small) == first
    assert record.read_text() != kept  # it was written again


def test_a_demo_on_other_tokens_takes_nothing_of_the_last(small: Path, tiny_demo: Callable[..., Path]) -> None:
    record = small.parent / "small.fingerprint"
    told = record.read_text()
    tiny_demo(tokens=33 * 24)
    assert record.read_text() == f"{folder_digest(small)}\n" != told


def own_checkpoint(small: Path) -> None:
    """Of the very plan that the demo carries out, by `prune`."""
    plan = Shrinking.load(small.parent / "shrink.json").plan
    loaded = load(small.parent.parent / "tiny")
    shutil.rmtree(small)
    write_pruned(loaded.model, loaded.tokenizer, plan, small)


OWN: dict[str, Callable[[Path], object]] = {
    "a checkpoint by prune": own_checkpoint,
    "a file beside the weights": lambda small: (small / "notes.txt").write_text("mine"),
    "a file below": lambda small: (small / "logs").mkdir() or (small / "logs/0").touch(),
    "weights trained further": lambda small: (small / "model.safetensors").write_bytes(b"mine"),
    "no record": lambda small: (small.parent / "small.fingerprint").unlink(),
    "a link": lambda small: small.symlink_to(small.rename(small.parent / "elsewhere")),
    "a file": lambda small: shutil.rmtree(small) or small.write_text("mine"),
}


def test_a_folder_that_is_not_the_demo_s_is_refused_before_anything_is_measured(
    small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = small.parent.rename(tmp_path / "whole")
    for name, own in OWN.items():
        run = Path(shutil.copytree(whole, tmp_path / "run"))  # with the times that the record knows
        own(run / "small")
        before = contents(run)
        with pytest.raises(LyapunovPruneError, match="small is not what a demo left there"):
            demo_of(UNLOADED, monkeypatch, run)
        assert contents(run) == before, name
        shutil.rmtree(run)


def test_where_nothing_can_be_written_or_drawn_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "joint.json").write_text("{}")
    with pytest.raises(LyapunovPruneError, match=r"joint\.json"):
        demo_of(UNLOADED, monkeypatch, run)
    shutil.rmtree(run)
    run.write_text("mine")
    with pytest.raises(LyapunovPruneError, match="is no folder"):
        demo_of(UNLOADED, monkeypatch, run)


def test_what_is_put_there_while_the_demo_runs_stays(
    small: Path, tiny_demo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled = demo_module.kept_profile

    def late(*arguments: Any, **more: Any) -> Any:
        (small / "notes.txt").write_text("mine")
        return profiled(*arguments, **more)

    monkeypatch.setattr(demo_module, "kept_profile", late)
    with pytest.raises(LyapunovPruneError, match="move it away"):
        tiny_demo(tokens=33 * 24)  # with the same tokens there is nothing left to do
    assert (small / "notes.txt").read_text() == "mine"


# On the real model.


@pytest.fixture(scope="session")  # a module's end may come between two of its tests under xdist
def run(tmp_path_factory: pytest.TempPathFactory, smollm2: Decoder) -> Path:
    """A short demo: every step of the long one, on fewer tokens, with fewer steps and timed less often."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "load", lambda name: smollm2)
        patch.setattr(demo_module, "PROFILED", 128)
        patch.setattr(demo_module, "SEARCH", 4.0)
        patch.setattr(demo_module, "STEPS", 2)
        patch.setattr(training_state, "SECONDS", math.inf)  # two gigabytes each time
        patch.setattr(texts, "EVALUATED", 512)
        judge_briefly(patch, context=32)
        demo_module.run_demo(folder, tokens=32 * 32, context=32, show=lambda *_: None)
    return folder


def test_the_demo_makes_a_smaller_model_that_is_healed(run: Path) -> None:
    report = Shrinking.load(run / "shrink.json")
    assert len(report.plan.remove) == 8
    dense, smaller = report.evaluation.perplexities
    assert 5 < dense.value < smaller.value < 200
    assert report.parameters[1] < 0.85 * report.parameters[0]
    assert (run / "report.html").read_text().count("<svg") >= 3
    assert Provenance.load(run / "small" / PROVENANCE).gate.passed


def test_a_later_demo_repeats_nothing(run: Path, smollm2: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "load", lambda name: smollm2)
    monkeypatch.setattr(demo_module, "PROFILED", 128)
    monkeypatch.setattr(profile_module, "profile_layers", lambda *a, **k: pytest.fail("repeated"))
    monkeypatch.setattr(demo_module, "carry_out", lambda *a, **k: pytest.fail("repeated"))
    demo_module.run_demo(run, tokens=32 * 32, context=32, show=lambda *_: None)


def test_the_checkpoint_is_plain_transformers(run: Path, english: TokenBatch, tmp_path: Path) -> None:
    ids = english.ids[:1, :64]
    torch.save(ids, tmp_path / "ids.pt")
    ((code, _, told),) = FORKED.run_together(PLAIN, [os.environ], str(tmp_path), str(run / "small"))
    assert code == 0, told
    with torch.no_grad():
        expected = load(run / "small").model(ids).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-4, atol=1e-4)


def test_the_attention_sink_of_layer_11(smollm2: Decoder, english: TokenBatch) -> None:
    """Energy pooling sees a strong contraction there, token pooling next to none."""
    profile = measure_contraction(smollm2.model, english.take(range(2)), seeds=(0,))
    assert profile.rho[11] < 0.2
    assert 0.8 < profile.pooled("token").rho[11] < 1.25
    assert 11 in profile.pooling_disagrees
    assert profile.sink_state_share[12] > 0.8


def test_influence_is_largest_at_the_ends(smollm2: Decoder, english: TokenBatch) -> None:
    influence = block_influence(smollm2.model, english.take(range(2))).influence
    assert set(influence.argsort()[-3:]) >= {0, 29}


def test_perplexity_is_the_library_s_own_loss(smollm2: Decoder, english: TokenBatch) -> None:
    ids = english.ids[:1]
    with torch.no_grad():
        loss = float(smollm2.model(ids, labels=ids).loss)
    assert perplexity(smollm2.model, replace(english, ids=ids)).nll == pytest.approx(loss, rel=1e-5)
