"""Every command takes a compact checkpoint, and measures what the hooked original has."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Done
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.text import load_text
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.export.compact import Cuts
from lyapunov_prune.export.compact_gate import cut_by_hooks
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.merging.merge import Merged, merge_layers
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.modeling_compact import CompactLlama
from lyapunov_prune.models.structure import find_layers
from lyapunov_prune.predictions.hierarchy_probe import HierarchyProbe
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.pruning.removed import PartsGone
from lyapunov_prune.results.history import read_history

pytestmark = pytest.mark.xdist_group("compact")  # one process writes `written`, not each

TEXT = ("--text", "builtin", "--tokens", "256", "--context", "64")
ATTENTION, BLOCKS = (0, 3), (1, 3)


@pytest.fixture(scope="module")
def batch(tokenizer: PreTrainedTokenizerFast) -> TokenBatch:
    return load_text("builtin", tokenizer, tokens=256, context=64)


@pytest.fixture(scope="module")
def merged(reader: PreTrainedModel, batch: TokenBatch) -> tuple[Merged, ...]:
    return merge_layers(reader, batch, BLOCKS, "affine")


@pytest.fixture(scope="module")
def written(
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batch: TokenBatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("compact") / "small"
    plan = PruningPlan.given(reader, PartsGone((), ATTENTION, BLOCKS, "affine"))
    write_pruned(reader, tokenizer, plan, folder, batch, format="compact")
    return folder


@pytest.fixture
def small(written: Path, tmp_path: Path) -> Path:
    """`written` where commands find it."""
    return Path(shutil.copytree(written, tmp_path / "small"))


@pytest.fixture
def hooked(reader: PreTrainedModel, merged: tuple[Merged, ...]) -> Iterator[PreTrainedModel]:
    """The original whose attentions return zero and whose hidden vectors are τ(x), as long as a test lasts."""
    plan = PruningPlan.given(reader, PartsGone((), ATTENTION, BLOCKS, "affine"))
    with cut_by_hooks(wrap(reader), Cuts.of(plan, merged)):
        yield reader


def test_eval_gives_the_perplexity_of_the_hooked_original(
    small: Path, hooked: PreTrainedModel, run: Callable[..., Done], tokenizer: PreTrainedTokenizerFast
) -> None:
    done = run("eval", "small", "--against", "tiny", *TEXT)
    assert done.code == 0, done.err
    text = load_text("builtin", tokenizer, tokens=256, context=64, split="evaluation")
    wanted = lp.perplexity(hooked, text).value
    dense, found = Evaluation.load("runs/small/eval.json").perplexities
    assert found.value == pytest.approx(wanted, rel=1e-5)
    assert dense.value != pytest.approx(wanted, rel=1e-3)


def test_profile_gives_the_rho_of_the_hooked_original(
    small: Path, hooked: PreTrainedModel, run: Callable[..., Done], batch: TokenBatch
) -> None:
    done = run("profile", "small", *TEXT, "--seeds", "1")
    assert done.code == 0, done.err
    profile = LayerProfile.load("runs/small/profile.json")
    wanted = lp.measure_contraction(hooked, batch, seeds=(0,))
    influence = lp.block_influence(hooked, batch)
    assert np.allclose(profile.contraction.rho, wanted.rho, rtol=1e-3)
    assert np.allclose(profile.influence.influence, influence.influence, rtol=1e-4)


def test_hierarchy_compares_it(small: Path, run: Callable[..., Done]) -> None:
    done = run("hierarchy", "tiny", "small", "--text", "builtin", "--tokens", "64", "--context", "32")
    assert done.code == 0, done.err
    probe = HierarchyProbe.load("runs/tiny/hierarchy.json")
    left_out = probe.by_layer().set_index(["layer", "what"]).kl
    assert left_out[0, "attention"] > 0
    assert left_out[1, "mlp"] > 0
    assert left_out[2, "layer"] == left_out[1, "attention"] == left_out[0, "mlp"] == 0


def test_hierarchy_drops_its_layers(small: Path, run: Callable[..., Done]) -> None:
    done = run("hierarchy", "small", "--text", "builtin", "--tokens", "64", "--context", "32")
    assert done.code == 0, done.err


def test_a_ranking_of_it_and_the_plan(small: Path, run: Callable[..., Done]) -> None:
    """What has no attention has no score; another can go, and whole layers too."""
    done = run("rank", "small", "--what", "attention", "--criterion", "bi", "--remove", "1", *TEXT)
    assert done.code == 0, done.err
    plan = PruningPlan.load("runs/small/plan.json")
    assert list(np.flatnonzero(np.isnan(plan.scores))) == list(ATTENTION)
    done = run("prune", "small", "--plan", "runs/small/plan.json", "-o", "smaller", *TEXT)
    assert done.code == 0, done.err
    assert load("smaller").model.num_parameters() < load("small").model.num_parameters()
    assert run("rank", "small", "--criterion", "rho", "--remove", "2", *TEXT, "-o", "by-rho").code == 0
    done = run("prune", "small", "--plan", "by-rho/plan.json", "-o", "shorter", *TEXT)
    assert done.code == 0, done.err
    assert len(find_layers(load("shorter").model).layers) == 4


def test_what_is_gone_is_refused_in_one_line(small: Path, run: Callable[..., Done]) -> None:
    again = {
        "attention": "layer 3 no longer has attention",
        "activation": "layer 3 is merged",
    }
    for what, message in again.items():
        options = ("--what", what, "--layers", "2,3")
        done = run("prune", "small", *options, "-o", "again", *TEXT)
        assert (done.code, done.changed) == (2, set())
        assert message in done.err


def test_layers_of_it_can_be_removed(small: Path, run: Callable[..., Done]) -> None:
    done = run("prune", "small", "--layers", "0,1", "-o", "smaller", *TEXT)
    assert done.code == 0, done.err
    model = load(small.parent / "smaller").model
    assert [module.layer_idx for module in model.modules() if hasattr(module, "layer_idx")] == [0, 1, 2]
    assert len(find_layers(model).layers) == 4
    both = ("--what", "attention", "--layers", "0")
    assert run("prune", "smaller", *both, "-o", "smallest", *TEXT).code == 0


def test_a_removal_that_leaves_no_attention_is_refused(small: Path) -> None:
    with pytest.raises(lp.LyapunovPruneError, match="no attention is left"):
        lp.remove_layers(load(small).model, [1, 2, 4, 5])


@pytest.mark.usefixtures("healing_kept")
def test_heal_learns_from_the_dense_model(small: Path, run: Callable[..., Done]) -> None:
    few = ("--tokens", "256", "--context", "32", "--steps", "2")
    done = run("heal", "small", "-o", "healed", *few)
    assert (done.code, done.changed) == (2, set())
    assert "--teacher " in done.err
    done = run("heal", "small", "--teacher", "tiny", "-o", "healed", *few)
    assert done.code == 0, done.err
    assert Provenance.load(Path("healed") / PROVENANCE).format == "compact"
    healed, before = (load(name).model for name in ("healed", "small"))
    assert type(healed) is CompactLlama
    assert isinstance(find_layers(healed).layers[1].mlp, nn.Linear)
    assert not torch.equal(find_layers(healed).layers[1].mlp.weight, find_layers(before).layers[1].mlp.weight)
    assert [step.kind for step in read_history("healed").steps] == ["prune", "heal"]


def test_compress_reaches_the_merged_matrix(small: Path, run: Callable[..., Done]) -> None:
    options = ("--method", "wanda", "--sparsity", "0.5")
    done = run("compress", "small", *options, "-o", "sparse", *TEXT)
    assert done.code == 0, done.err
    sparse: Decoder = load("sparse")
    assert type(sparse.model) is CompactLlama
    zeros = [float((p == 0).float().mean()) for p in find_layers(sparse.model).layers.parameters() if p.ndim == 2]
    assert zeros == pytest.approx([0.5] * len(zeros), abs=0.02)
    assert isinstance(find_layers(sparse.model).layers[1].mlp, nn.Linear)


def test_report_shows_its_gate(small: Path, run: Callable[..., Done]) -> None:
    assert run("profile", "small", *TEXT, "--seeds", "1").code == 0
    shutil.copytree(small, "runs/small/small")
    done = run("report", "runs/small")
    assert done.code == 0, done.err
    page = Path("runs/small/report.html").read_text()
    assert "The compact checkpoint small/ was written after these checks passed" in page
    assert "reloads without this package" in page
