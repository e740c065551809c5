"""One command a model: the column against an independent float64 reference, resumed, partial, and in the tables."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import torch
import typer
from helpers import make_tiny, make_tokenizer
from scipy import stats
from scipy.special import log_softmax
from transformers import PreTrainedModel
from typer.testing import CliRunner

import lyapunov_prune as lp
from experiments import all as experiment
from experiments.columns import ALPHAS, Answers, Column, correlation, mean_accuracy, paired_difference
from experiments.common import Model, flat, inputs
from lyapunov_prune.evaluation.tasks import Task

summary = importlib.import_module("experiments.1_contraction.summary.run")
LAYERS = 5
GRID: dict[str, Any] = {"sparsities": (0.5,), "ranks": (None, 8), "cache_radii": (0.0,)}  # of thirty settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model, in a folder that nothing of this machine's should be told of."""
    folder = tmp_path_factory.mktemp("private") / "tiny"
    make_tiny("llama", num_hidden_layers=LAYERS, vocab_size=260).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("texts")
    for name, seed in (("valid.txt", 1), ("test.txt", 2)):
        drawn = np.random.default_rng(seed).integers(97, 123, 2000)
        (folder / name).write_text("".join(map(chr, drawn)), encoding="utf-8")
    return str(folder / "valid.txt"), str(folder / "test.txt")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, ...]:
    folder = tmp_path_factory.mktemp("tasks")
    choices = [{"query": f"{i}, what?", "choices": ["ab", "cde", "f"], "gold": i % 3} for i in range(6)]
    blanks = [{"context_options": ["a", "b"], "continuation": f"{i}.", "gold": i % 2} for i in range(6)]
    for name, rows in (("choices", choices), ("blanks", blanks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return lp.evaluation.load_tasks([folder / "choices.jsonl", folder / "blanks.jsonl"])


@pytest.fixture(scope="module")
def column(
    folder: Path, texts: tuple[str, str], tasks: tuple[Task, ...], tmp_path_factory: pytest.TempPathFactory
) -> Column:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        patch.setattr(lp.bounds, "check_grid", partial(lp.bounds.check_grid, **GRID))
        given = inputs(Model(str(folder), "cpu"), texts[0], 64, 32, unseen=texts[1])
        made = list(experiment.measure(given, "tiny", tasks, 5))
        assert [c.blends is None for c in made[:5]] == [True, True, False, False, False]
        assert [c.accuracy is None for c in made] == [True] * 5 + [False] * 9  # dense, and eight sets of layers
        with pytest.MonkeyPatch.context() as forbid:  # all is kept: nothing is measured again
            for module, name in (
                ("lyapunov_prune.sensitivity.sweep", "Sweep._measure"),
                ("lyapunov_prune.bounds.check", "_outcome"),
                ("lyapunov_prune.profiles.profile", "profile_layers"),
                ("lyapunov_prune.evaluation.harness", "run"),
            ):
                forbid.setattr(f"{module}.{name}", lambda *_, **__: pytest.fail("measured again"))
            again = inputs(Model(str(folder), "cpu"), texts[0], 64, 32, unseen=texts[1])
            whole = json.dumps(made[-1].to_json())
            assert json.dumps(list(experiment.measure(again, "tiny", tasks, 5))[-1].to_json()) == whole
            patch.chdir(tmp_path_factory.mktemp("elsewhere"))  # nor what the column itself has
            assert json.dumps(list(experiment.measure(again, "tiny", tasks, 5, made[-1]))[-1].to_json()) == whole
            other = inputs(Model(str(folder), "cpu"), texts[1], 64, 32, unseen=texts[0])
            assert not experiment.fits(made[-1], other)
    return made[-1]


def reference(model: PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    """The loss of every window in nats, in float64."""
    with torch.no_grad():
        log_p = log_softmax(model.double()(ids).logits[:, :-1].numpy(), axis=-1)
    return -np.take_along_axis(log_p, ids[:, 1:, None].numpy(), axis=-1)[..., 0].mean(-1)


def test_every_removal_is_that_of_a_model_without_the_layers(
    column: Column, folder: Path, texts: tuple[str, str]
) -> None:
    loaded = lp.load(folder)
    ids = lp.load_text(texts[1], loaded.tokenizer, tokens=64, context=32, split="all").ids
    dense = reference(lp.load(folder).model, ids)
    np.testing.assert_allclose(column.perplexity, np.exp(dense.mean()), rtol=1e-4)
    assert column.removal is not None
    for layer, regret in enumerate(column.removal.regret):
        losses = reference(lp.remove_layers(loaded.model, lp.PruningPlan.given(loaded.model, [layer])), ids)
        np.testing.assert_allclose(regret, np.exp(losses.mean()) - np.exp(dense.mean()), rtol=1e-2, atol=1e-2)
    assert {(r.criterion, r.count) for r in column.removal.sets} >= {("blend", 4), ("angular", 4), ("random 2", 4)}
    for chosen in column.removal.sets:
        assert len(chosen.layers) == chosen.count < LAYERS
        losses = reference(lp.remove_layers(loaded.model, lp.PruningPlan.given(loaded.model, chosen.layers)), ids)
        np.testing.assert_allclose(chosen.perplexity, np.exp(losses.mean()), rtol=1e-4)
        np.testing.assert_allclose(chosen.degradation, np.exp(losses.mean() - dense.mean()), rtol=1e-4)


def test_a_blend_is_block_influence_at_one_end_and_rho_at_the_other(
    column: Column, folder: Path, texts: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert column.removal is not None
    assert column.blends is not None
    monkeypatch.chdir(tmp_path)
    profile = inputs(Model(str(folder), "cpu"), texts[0], 64, 32, unseen=texts[1]).profile()
    chosen = {r.criterion: r.layers for part in (column.removal, column.blends) for r in part.sets}
    for alpha, name in ALPHAS.items():
        assert experiment.blend(profile, alpha).plan(4).remove == chosen[name]


def test_a_column_says_what_it_was_measured_on_and_nothing_of_the_machine(column: Column, tmp_path: Path) -> None:
    text = column.save(tmp_path / "tiny.json").read_text(encoding="utf-8")
    assert column.measured_on.text == "test.txt"
    assert column.calibrated_on.text == "valid.txt"
    assert column.measured_on.model.name == "tiny"
    assert "private" not in text
    loaded = Column.load(tmp_path / "tiny.json")
    assert loaded.removal is not None
    assert column.removal is not None
    assert repr(loaded.removal.sets) == repr(column.removal.sets)  # an interval over two windows is NaN
    assert column.bounds is not None
    assert (column.bounds.checks, column.bounds.violations) == (2 * 7 * LAYERS, 0)


def test_s_star_is_the_highest_sparsity_with_little_regret(column: Column) -> None:
    assert column.pruning is not None
    low = [float(s) for s, regret in column.pruning.first_layer.items() if regret < column.pruning.limit]
    assert column.pruning.threshold == max(low, default=None)
    assert set(column.pruning.components) == {"weight-only", "wanda"}


def test_accuracy_is_that_of_the_model_without_the_layers_item_by_item(
    column: Column, folder: Path, tasks: tuple[Task, ...]
) -> None:
    assert column.accuracy is not None
    assert column.removal is not None
    loaded = lp.load(folder)
    chosen = next(r for r in column.removal.sets if r.criterion == "blend")
    small = lp.remove_layers(loaded.model, lp.PruningPlan.given(loaded.model, chosen.layers))
    wanted = lp.evaluate_tasks({"m": small}, loaded.tokenizer, tasks, limit=5)
    choices, blanks = column.accuracy.of("blend", 4)
    assert (len(choices.items), len(blanks.items), blanks.per_character) == (5, 5, "")
    assert choices.items.mean() == wanted.score("m", "choices", "acc_norm").value
    assert blanks.items.mean() == wanted.score("m", "blanks", "acc").value
    assert column.accuracy.of("blend", 8) == []
    assert [t.source for t in column.accuracy.tasks] == ["choices.jsonl", "blanks.jsonl"]
    assert [round(t.chance, 3) for t in column.accuracy.tasks] == [0.333, 0.5]


def test_criteria_that_choose_the_same_layers_are_scored_once(
    column: Column,
    folder: Path,
    texts: tuple[str, str],
    tasks: tuple[Task, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert column.removal is not None
    sets = [replace(r, layers=(1, 2)) for r in column.removal.sets if r.criterion in ("bi", "rho")]
    monkeypatch.chdir(tmp_path)
    given = inputs(Model(str(folder), "cpu"), texts[0], 64, 32, unseen=texts[1])
    scored: list[int] = []
    own = lp.evaluate_tasks
    monkeypatch.setattr(lp, "evaluate_tasks", lambda models, *a, **k: (scored.append(1), own(models, *a, **k))[1])
    found = list(
        experiment.accuracy(
            given, replace(column, removal=replace(column.removal, sets=tuple(sets)), blends=None), tasks, 3
        )
    )
    assert len(scored) == 2 * len(tasks)
    assert [a.right for a in found[-1].of("bi", 4)] == [a.right for a in found[-1].of("rho", 4)]


def test_differences_are_paired_by_item() -> None:
    def answers(task: str, right: str) -> Answers:
        return Answers("x", 4, (1,), task, right, "")

    one, other = (
        [answers("a", "1111100000"), answers("b", "11110")],
        [answers("a", "0011110000"), answers("b", "11110")],
    )
    mean, low, high, p = paired_difference(one, other)
    d = np.array([1, 1, 0, 0, 0, -1, 0, 0, 0, 0])
    half = stats.norm.ppf(0.975) * d.std(ddof=1) / np.sqrt(10) / 2
    np.testing.assert_allclose([mean, low, high], [0.05, 0.05 - half, 0.05 + half])
    assert p == stats.binomtest(2, 3).pvalue
    assert paired_difference(one, one) == (0, 0, 0, 1)
    assert mean_accuracy(one)[0] == pytest.approx((0.5 + 0.8) / 2)
    low, high = one[1].interval
    z = stats.norm.ppf(0.975)
    centre = (4 + z**2 / 2) / (5 + z**2)
    assert (low + high) / 2 == pytest.approx(centre)


def test_the_spread_is_a_quotient_or_nothing(column: Column) -> None:
    assert column.pruning is not None
    regrets = {"wanda": {"q": 2.0, "k": 0.5}, "weight-only": {"q": 2.0, "k": -0.5}}
    pruning = replace(column.pruning, components=regrets)
    assert pruning.spread("wanda") == 4
    assert np.isnan(pruning.spread("weight-only"))


def test_correlation_is_scipys_with_an_interval_around_it() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 20))
    found = correlation("x", x, x + y)
    assert (found.spearman, found.p) == tuple(stats.spearmanr(x, x + y))
    assert found.low < found.spearman < found.high
    assert np.isnan(correlation("constant", np.ones(20), y).spearman)


def test_the_tables_hold_a_column_whole_or_in_part(
    column: Column, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "COLUMNS", tmp_path)
    assert "| 26.53 |" in summary.written()["table-1"]
    replace(column, pruning=None, bounds=None, removal=None).save(tmp_path / "tiny.json")
    assert f"| perplexity | {column.perplexity:.4g} | 26.53" in summary.written()["table-1"]
    assert "| s* | — | 0.50 |" in summary.written()["table-1"]
    column.save(tmp_path / "tiny.json")
    tables = summary.written()
    assert f"({column.contraction.rho.argmax()}) | 0.96 | 2.05 |" in tables["table-1"]
    assert "| **tiny** | random |" in tables["table-3"]
    assert tables["regret"].count("**tiny**") == 5
    assert tables["accuracy"].count("**tiny**") == 10
    assert tables["paired"].count("**tiny**") == 4 + 6


def test_few_models_give_no_correlation_and_say_so(column: Column) -> None:
    assert summary.spearman([(1.0, 2.0), (2.0, 3.0)]) == (2, "not computed below 5 models", "", "")
    n, value, without, _ = summary.spearman([(1, 1), (2, 2), (3, 3), (4, 4), (5, 0)])
    assert (n, value, without) == (5, "+0.00", "-0.20 to +1.00")
    assert "| ours | 2 | not computed" in summary.across([column, column])


# They read committed numbers or a finished run, or make their own model.
NO_MODEL = {"summary", "joint_map", "vit", "joint", "small_models", "coverage", "strange"}
EXPERIMENTS = sorted(path.parent for path in Path(experiment.__file__).parent.glob("*/*/run.py"))


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda path: path.name)
def test_an_experiment_runs_on_any_model_and_as_its_readme_says(folder: Path) -> None:
    module = importlib.import_module(tables.module_of(folder.name))
    app = typer.Typer()
    app.command()(flat(getattr(module, "main", lambda: None)))  # what only shows its tables has no main
    command = typer.main.get_command(app)
    options = {name for parameter in command.params for name in parameter.opts}
    assert folder.name in NO_MODEL or options >= {"--model", "--device", "--dtype"}
    page = folder.parent / "README.md"
    for line in re.findall(rf"^python \S+/{folder.name}/run.py(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        command.make_context("run.py", shlex.split(line))  # which refuses what it does not know


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["tiny-that-is-not", "--offline-path"], "No such option"), ([], "name a model"), (["./nowhere"], "no model at")],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    app = typer.Typer()
    app.command()(experiment.main)
    done: Any = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in done.output
