"""The DeciLM format is a compact checkpoint that engines know too, as long as they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import VOCABULARY, Done, make_tiny, make_tokenizer, saved

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.checkpoints.saving import save
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.formats.compact import Compact
from lyapunov_prune.export.formats.deci import Deci
from lyapunov_prune.export.formats.gguf import GGUF
from lyapunov_prune.export.llama_cpp import ENGINE
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.models.compact import BLOCKS
from lyapunov_prune.models.engines import check_engines
from lyapunov_prune.models.loading import load
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import remove_layers


@pytest.fixture(autouse=True)
def _here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = GateCheck("reloads without this package", True, 0.0, 1.0, "not run: it takes seconds")
    for room in ("export.compact_gate", "checkpoints.saving"):
        monkeypatch.setattr(f"lyapunov_prune.{room}.elsewhere_check", lambda *_: passed)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    model = make_tiny("llama", vocab_size=len(VOCABULARY), max_position_embeddings=640)
    return saved(model, make_tokenizer(), tmp_path / "dense")


def told(folder: Path) -> list[bool] | None:
    """Which layers lack their attention, by what engines read; None for what is no DeciLM."""
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"] == ["DeciLMForCausalLM"]) == (BLOCKS in config)
    return [block["attention"]["no_op"] for block in config[BLOCKS]] if BLOCKS in config else None


def test_a_pruned_model_runs_in_llama_cpp(dense: Path, tmp_path: Path) -> None:
    model = load(dense)
    plan = PruningPlan.given(model, [2], drop_attention=[1, 4])
    provenance = write_pruned(model, model.tokenizer, plan, tmp_path / "deci", format="deci")
    assert provenance.format == "deci"
    assert told(tmp_path / "deci") == [False, True, False, True, False]
    assert check_engines(str(tmp_path / "deci")).passed  # engines know it, unlike other compact checkpoints
    again = load(tmp_path / "deci")
    assert GGUF("q8_0").export(again, tmp_path / "x.gguf").not_run == (
        ("reloads as saved",) if installed() else ("reloads as saved", ENGINE)
    )


def test_plain_compact_and_deci_become_each_other(dense: Path, tmp_path: Path) -> None:
    model = load(dense)
    plan = PruningPlan.given(model, drop_attention=[1, 4])
    write_pruned(model, model.tokenizer, plan, tmp_path / "zeros")
    Deci().export(load(tmp_path / "zeros"), tmp_path / "deci")
    loaded = load(tmp_path / "deci")
    Compact().export(loaded, tmp_path / "compact")
    Deci().export(load(tmp_path / "compact"), tmp_path / "again")
    assert told(tmp_path / "deci") == told(tmp_path / "again") == [False, True, False, False, True, False]
    assert told(tmp_path / "compact") is None
    assert BLOCKS in vars(loaded.model.config)
    ids = torch.arange(40)[None]
    for name in ("deci", "compact", "again"):
        assert torch.allclose(load(tmp_path / name).model(ids).logits, load(tmp_path / "zeros").model(ids).logits)


def test_what_is_cut_later_is_told_as_long_as_engines_know_it(dense: Path, tmp_path: Path) -> None:
    model = load(dense)
    write_pruned(model, model.tokenizer, PruningPlan.given(model, drop_attention=[1, 4]), tmp_path / "a", format="deci")
    made = load(tmp_path / "a")
    save(remove_layers(made.model, PruningPlan.given(made, [0, 1])), made.tokenizer, tmp_path / "b")
    assert told(tmp_path / "b") == [False, False, True, False]
    save(make_compact(made.model, Cuts(attention=(0,))), made.tokenizer, tmp_path / "c")
    assert told(tmp_path / "c") is None
    assert load(tmp_path / "c").structure.num_layers == 6


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"drop_attention": [0]}, "layer 0 lacks its attention"),
        ({"remove": [0], "drop_attention": [1]}, "layer 0 lacks its attention"),
        ({"drop_attention": [1], "drop_activation": [2], "reduction": "mean-gate"}, "merged blocks"),
        ({"remove": [1]}, "a plain checkpoint holds"),
    ],
)
def test_plans_that_engines_do_not_know_are_refused(
    plan: dict[str, list[int]], message: str, dense: Path, tmp_path: Path
) -> None:
    model = load(dense)
    with pytest.raises(LyapunovPruneError, match=message):
        write_pruned(model, None, PruningPlan.given(model, **plan), tmp_path / "x", format="deci")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("format", ["deci", "compact"])
def test_a_model_that_lacks_nothing_is_refused(
    format: str, run_bad: Callable[..., str], run: Callable[..., Done]
) -> None:
    assert "no attention is absent" in run_bad("export", "tiny", "--format", format, "-o", "x")
