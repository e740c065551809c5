"""End to end on the real built-in model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lyapunov_prune import PruningPlan, block_influence, measure_contraction, perplexity, remove_layers, verify_removal
from lyapunov_prune.cli import demo as demo_module
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.loading import load
from lyapunov_prune.profiles import profile as profile_module
from lyapunov_prune.pruning.checkpoint import write_pruned
from lyapunov_prune.pruning.curve import RemovalCurve
from lyapunov_prune.ranking.table import DEFAULT
from lyapunov_prune.results.files import folder_digest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("lyapunov_prune")]
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


# Whose folder `pruned` is.


@pytest.fixture
def tiny_demo(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The demo in `run`, on a tiny model, of which one layer goes."""
    loaded = load(checkpoint)
    monkeypatch.setattr(demo_module, "load", lambda name: loaded)
    monkeypatch.setattr(demo_module, "REMOVALS", (1,))
    monkeypatch.setattr(demo_module, "STEPS", 2)
    monkeypatch.setattr(demo_module, "WRITTEN", ("blend", 1))
    monkeypatch.setattr(demo_module, "RACE", {"prompt": 8, "steps": 2, "repeats": 1})

    def demo(resume: bool = False) -> Path:
        run = checkpoint.parent / "run"
        demo_module.run_demo(run, tokens=128, context=64, resume=resume, show=lambda *_: None)
        return run / "pruned"

    return demo


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_demo_replaces_the_checkpoint_of_an_earlier_one(tiny_demo: Callable[..., Path]) -> None:
    pruned = tiny_demo()
    first, record = contents(pruned), pruned.parent / "pruned.fingerprint"
    told = record.read_text()
    tiny_demo()
    assert contents(pruned) == first
    assert record.read_text() != told  # written anew
    told = record.read_text()
    tiny_demo(resume=True)
    assert record.read_text() == told == f"{folder_digest(pruned)}\n"
    shutil.rmtree(pruned)  # as a kill leaves it before the folder has its name
    tiny_demo(resume=True)
    assert contents(pruned) == first


def own_checkpoint(pruned: Path) -> None:
    """Of the very plan that the demo carries out, by `prune`."""
    plan = PruningPlan.load(pruned.parent / f"plan-{DEFAULT}.json")
    loaded = load(pruned.parent.parent / "tiny")
    shutil.rmtree(pruned)
    write_pruned(loaded.model, loaded.tokenizer, plan, pruned)


OWN: dict[str, Callable[[Path], object]] = {
    "a checkpoint by prune": own_checkpoint,
    "a file beside the weights": lambda pruned: (pruned / "notes.txt").write_text("mine"),
    "a file below": lambda pruned: (pruned / "logs").mkdir() or (pruned / "logs/0").touch(),
    "weights trained further": lambda pruned: (pruned / "model.safetensors").write_bytes(b"mine"),
    "no record": lambda pruned: (pruned.parent / "pruned.fingerprint").unlink(),
    "a link": lambda pruned: pruned.symlink_to(pruned.rename(pruned.parent / "elsewhere")),
    "a file": lambda pruned: shutil.rmtree(pruned) or pruned.write_text("mine"),
}


@pytest.mark.parametrize("own", OWN.values(), ids=list(OWN))
def test_a_folder_that_is_not_the_demo_s_is_refused_before_anything_is_measured(
    own: Callable[[Path], object], tiny_demo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = tiny_demo()
    own(pruned)
    before = contents(pruned.parent)
    monkeypatch.setattr(demo_module, "load", lambda name: pytest.fail("loaded"))
    for resume in (False, True):
        with pytest.raises(LyapunovPruneError, match=r"pruned.*demo") as raised:
            tiny_demo(resume)
        assert "\n" not in str(raised.value)
    assert contents(pruned.parent) == before


def test_where_nothing_can_be_written_or_drawn_nothing_is_measured(
    tiny_demo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_demo().parent
    monkeypatch.setattr(demo_module, "load", lambda name: pytest.fail("loaded"))
    (run / "joint.json").write_text("{}")
    with pytest.raises(LyapunovPruneError, match=r"joint\.json"):
        tiny_demo()
    shutil.rmtree(run)
    run.write_text("mine")
    with pytest.raises(LyapunovPruneError, match="no folder"):
        tiny_demo()


def test_what_is_put_there_while_the_demo_runs_stays(
    tiny_demo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned, evaluate = tiny_demo(), demo_module.evaluate_removals

    def late(*arguments: Any, **more: Any) -> Any:
        (pruned / "notes.txt").write_text("mine")
        return evaluate(*arguments, **more)

    monkeypatch.setattr(demo_module, "evaluate_removals", late)
    with pytest.raises(LyapunovPruneError, match="move it away"):
        tiny_demo()
    assert (pruned / "notes.txt").read_text() == "mine"


# On the real model.


def shorten(patch: pytest.MonkeyPatch, smollm2: Decoder) -> None:
    """Fewer removals and a short race."""
    patch.setattr(demo_module, "load", lambda name: smollm2)
    patch.setattr(demo_module, "REMOVALS", (1, 4))
    patch.setattr(demo_module, "STEPS", 4)
    patch.setattr(demo_module, "RACE", {"prompt": 32, "steps": 4, "repeats": 2})


@pytest.fixture(scope="session")  # a module's end may come between two of its tests under xdist
def run(tmp_path_factory: pytest.TempPathFactory, smollm2: Decoder) -> Path:
    """A short demo: every step of the long one, on 768 tokens, with fewer removals and a short race."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch, smollm2)
        demo_module.run_demo(folder, tokens=768, context=128, show=lambda *_: None)
    return folder


def test_the_demo_writes_every_result(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    plans = {f"plan-{c}.json" for c in demo_module.COMPARED}
    results = {f"{name}.json" for name in ("profile", "removal", "recovery", "speed")}
    assert names == results | {"report.html", "figures", "pruned", "pruned.fingerprint"} | plans
    assert (run / "report.html").read_text().count("<svg") == 6
    dense, cut, mended, healed = RemovalCurve.load(run / "recovery.json").rows
    assert dense.perplexity < mended.perplexity < cut.perplexity
    assert dense.perplexity < healed.perplexity < cut.perplexity  # four steps are too few to hold it against mended
    curve = RemovalCurve.load(run / "removal.json")
    assert len(curve.rows) == 1 + 2 * 3
    assert 5 < curve.dense.perplexity < 60
    assert all(row.perplexity > curve.dense.perplexity for row in curve.rows[1:])


def test_the_demo_resumes(run: Path, smollm2: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, smollm2)
    monkeypatch.setattr(profile_module, "profile_layers", lambda *a, **k: pytest.fail("repeated"))
    for work in ("evaluate_removals", "write_pruned", "measure_speed", "mend", "heal"):
        monkeypatch.setattr(demo_module, work, lambda *a, **k: pytest.fail("repeated"))
    demo_module.run_demo(run, tokens=768, context=128, resume=True, show=lambda *_: None)


def test_the_checkpoint_is_plain_transformers(run: Path, smollm2: Decoder, english: TokenBatch, tmp_path: Path) -> None:
    plan = PruningPlan.load(run / f"plan-{DEFAULT}.json")
    ids = english.ids[:1, :64]
    torch.save(ids, tmp_path / "ids.pt")
    arguments = [sys.executable, "-c", PLAIN, run / "pruned", tmp_path / "ids.pt", tmp_path / "logits.pt"]
    subprocess.run(arguments, check=True, capture_output=True, cwd=tmp_path)
    with torch.no_grad():
        expected = remove_layers(smollm2.model, plan)(ids).logits
    # Another process may run with another number of threads, and so in another order of sums.
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("remove", [[0], [11], [5, 20], [26, 27, 28, 29]])
def test_the_real_model_passes_the_gate(smollm2: Decoder, english: TokenBatch, remove: list[int]) -> None:
    report = verify_removal(smollm2.model, remove_layers(smollm2.model, remove), remove, english)
    assert report.passed, f"\n{report}"


def test_the_attention_sink_of_layer_11(smollm2: Decoder, english: TokenBatch) -> None:
    """Energy pooling sees a strong contraction there, token pooling next to none."""
    profile = measure_contraction(smollm2.model, english, seeds=(0,))
    assert profile.rho[11] < 0.2
    assert 0.8 < profile.pooled("token").rho[11] < 1.25
    assert 11 in profile.pooling_disagrees
    assert profile.sink_state_share[12] > 0.8


def test_difference_and_derivative_agree(smollm2: Decoder, english: TokenBatch) -> None:
    batch = TokenBatch(english.ids[:1, :64], english.text, english.split, english.bos)
    difference = measure_contraction(smollm2.model, batch, seeds=(0,), epsilon=1e-3)
    derivative = measure_contraction(smollm2.model, batch, seeds=(0,), method="jvp")
    assert abs(difference.rho / derivative.rho - 1).max() < 0.02


def test_influence_is_largest_at_the_ends(smollm2: Decoder, english: TokenBatch) -> None:
    influence = block_influence(smollm2.model, english).influence
    assert set(influence.argsort()[-3:]) >= {0, 29}


def test_perplexity_is_the_library_s_own_loss(smollm2: Decoder, english: TokenBatch) -> None:
    with torch.no_grad():
        losses = [float(smollm2.model(row[None], labels=row[None]).loss) for row in english.ids]
    assert perplexity(smollm2.model, english).nll == pytest.approx(sum(losses) / len(losses), rel=1e-5)
