"""What a sweep says of a change is what the changed model's perplexity says."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, assert_same, bits, computed, hooks_of, launched_twice, leave, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.compression.methods.magnitude import Magnitude
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.forward.hooks import final_state, skipped
from lyapunov_prune.forward.scoring import next_token_loss
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.sensitivity.drift import Reference
from lyapunov_prune.sensitivity.sweep import DENSE, Job, Outcome, Sweep


def sparse(model: PreTrainedModel, layers: Iterable[int], taken: list[str] | None = None) -> Job:
    """Half of every matrix of `layers` gone; adds its key to `taken` whenever it is carried out."""
    chosen = [p for p in find_projections(wrap(model)) if p.layer in layers]
    key = f"sparse {','.join(map(str, layers))}"

    def weights() -> dict[Any, torch.Tensor]:
        if taken is not None:
            taken.append(key)
        return {p: Magnitude().compress(p.weight(model), 0.5) for p in chosen}

    return Job(key, min(layers), weights=weights)


def removed(*layers: int) -> Job:
    return Job(f"remove {layers}", min(layers), remove=layers)


def really(name: str, jobs: Iterable[Job], ids: torch.Tensor, spoil: Any = None) -> dict[str, Outcome]:
    """The outcomes of a model that is really changed, from its own forward."""
    twin, found = make_tiny(name), {}
    if spoil is not None:
        spoil(twin)
    structure, own = find_structure(twin), {key: W.clone() for key, W in twin.state_dict().items()}
    with torch.no_grad():
        dense = Reference([final_state(structure, ids)])
        for job in jobs:
            for p, W in job.weights().items() if job.weights is not None else ():
                p.weight(twin).copy_(W)
            with skipped(structure, job.remove):
                losses = [next_token_loss(z, y) for z, y in zip(twin(ids).logits, ids, strict=True)]
                found[job.key] = Outcome(np.array(losses), dense.drift([final_state(structure, ids)]))
            twin.load_state_dict(own)
    return found


def assert_all_agree(found: dict[str, Outcome], wanted: dict[str, Outcome]) -> None:
    for key, outcome in wanted.items():
        assert_agree(found[key], outcome)


def assert_agree(found: Outcome, wanted: Outcome, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(found.windows, wanted.windows, rtol=rtol)
    np.testing.assert_allclose(found.drift, wanted.drift, rtol=1e-3, atol=1e-6)


def test_outcomes_are_those_of_really_changed_models(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    before = bits(model)
    jobs = [
        *(sparse(model, [k]) for k in (5, 0, 3)),
        sparse(model, range(LAYERS)),
        sparse(model, [4, 2]),
        *(removed(k) for k in (0, 2, 5)),
        removed(1, 3),
    ]
    found = Sweep(model, ids, batch_size=2).run(jobs)
    assert list(found) == [DENSE, *(job.key for job in jobs)]
    assert_all_agree(found, really(family, jobs, ids))
    np.testing.assert_allclose(found[DENSE].windows, perplexity(model, ids).windows, rtol=1e-6)
    assert found[DENSE].drift == pytest.approx(0, abs=1e-9)
    assert_same(model, before)
    assert hooks_of(model) == 0


def test_the_beginnings_of_windows_are_scored_alone(family: str, ids: torch.Tensor) -> None:
    jobs = [replace(removed(*layers), tokens=5) for layers in ((0,), (2, 3), (5,))]
    found = Sweep(make_tiny(family), ids, batch_size=2).run(jobs)
    for key, outcome in really(family, jobs, ids[:, :5]).items():
        np.testing.assert_allclose(found[key].windows, outcome.windows, rtol=1e-5)
        assert math.isnan(found[key].drift)


def test_weights_and_layers_can_change_together(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    job = Job("both", 1, weights=sparse(model, [3]).weights, remove=(1, 4))
    assert_all_agree(Sweep(model, ids).run([job]), really("llama", [job], ids))


@pytest.mark.parametrize("taken", [True, False], ids=["taken away", "left for ever"])
def test_a_layer_that_needs_more_than_its_state_is_given_it(taken: bool, ids: torch.Tensor) -> None:
    """Layer 4 adds what layer 1 left behind: whole forwards where none can begin in between."""

    def spoil(model: PreTrainedModel) -> None:
        leave(model, 1, 4, taken=taken)

    model = make_tiny("llama")
    spoil(model)
    jobs = [*(sparse(model, [k]) for k in range(LAYERS)), *(removed(k) for k in range(LAYERS)), removed(1, 2)]
    found = Sweep(model, ids).run(jobs)
    assert_all_agree(found, really("llama", jobs, ids, spoil))


# What it costs.


def test_the_numbers_are_those_that_perplexity_gives(ids: torch.Tensor) -> None:
    model = make_tiny("gemma2")
    job = sparse(model, range(LAYERS))
    found = Sweep(model, ids).run([job])
    np.testing.assert_array_equal(found[DENSE].windows, perplexity(model, ids).windows)
    assert job.weights is not None
    for p, W in job.weights().items():
        p.weight(model).copy_(W)
    np.testing.assert_array_equal(found[job.key].windows, perplexity(model, ids).windows)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_batch_size_does_not_matter(batch_size: int, ids: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    jobs = [sparse(model, [3]), removed(2), sparse(model, [0])]
    wanted, found = Sweep(model, ids).run(jobs), Sweep(model, ids, batch_size=batch_size).run(jobs)
    for key, outcome in found.items():
        assert_agree(outcome, wanted[key])


def test_a_sweep_over_all_layers_costs_half_its_forwards(family: str, ids: torch.Tensor) -> None:
    model, windows = make_tiny(family), len(ids)
    found = Sweep(model, ids)
    assert np.isfinite(found.dense).all()
    calls = computed(model)
    found.run([sparse(model, [k]) for k in reversed(range(LAYERS))])
    # Layer k: once in each of the k + 1 jobs that begin at or before it.
    assert [calls[k] for k in range(LAYERS)] == [windows * (k + 1) for k in range(LAYERS)]


def test_a_job_is_measured_once(ids: torch.Tensor) -> None:
    model, taken = make_tiny("llama"), []
    found = Sweep(model, ids)
    job, same = sparse(model, [2], taken), sparse(model, [2], taken)
    first = found.run([job, same, job])
    calls = computed(model)
    again = found.run([same])
    assert taken == [job.key]
    assert not calls
    np.testing.assert_array_equal(again[job.key].windows, first[job.key].windows)
    np.testing.assert_array_equal(found.dense, first[DENSE].windows)
    assert not calls


def test_jobs_are_taken_by_their_first_layer(ids: torch.Tensor) -> None:
    model, taken = make_tiny("llama"), []
    Sweep(model, ids).run([sparse(model, [k], taken) for k in (4, 0, 5, 2)])
    assert taken == [f"sparse {k}" for k in (0, 2, 4, 5)]


def test_dropout_is_off(ids: torch.Tensor) -> None:
    model = make_tiny("gpt2").train()
    job = removed(2)
    assert_all_agree(Sweep(model, ids).run([job]), really("gpt2", [job], ids))
    assert model.training


# Interrupted.


def interrupted(model: PreTrainedModel, ids: torch.Tensor, folder: Path, after: int) -> list[str]:
    """Keys of the jobs that began in a sweep that is interrupted in its job number `after`."""
    taken: list[str] = []

    def jobs() -> Iterable[Job]:
        for k in range(LAYERS):
            job = sparse(model, [k], taken)
            assert job.weights is not None

            def weights(made: Any = job.weights) -> Any:
                if len(taken) == after:
                    raise KeyboardInterrupt
                return made()

            yield Job(job.key, job.first, weights=weights)

    with pytest.raises(KeyboardInterrupt):
        Sweep(model, ids, folder=folder).run(jobs())
    return taken


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_later_run_does_nothing_twice(after: int, ids: torch.Tensor, tmp_path: Path) -> None:
    model = make_tiny("llama")
    before = interrupted(model, ids, tmp_path, after)
    assert len(before) == after
    assert hooks_of(model) == 0
    taken: list[str] = []
    jobs = [sparse(model, [k], taken) for k in range(LAYERS)]
    found = Sweep(model, ids, folder=tmp_path).run(jobs)
    assert before + taken == [job.key for job in jobs]
    wanted = Sweep(model, ids).run([sparse(model, [k]) for k in range(LAYERS)])
    for key, outcome in wanted.items():
        np.testing.assert_array_equal(found[key].windows, outcome.windows)
        assert found[key].drift == outcome.drift
    calls = computed(model)
    Sweep(model, ids, folder=tmp_path).run(jobs)
    assert not calls


@pytest.mark.parametrize("what", ["text", "model", "mlp", "head", "dtype", "calibration"])
def test_what_was_measured_on_something_else_is_measured_again(what: str, ids: torch.Tensor, tmp_path: Path) -> None:
    model = make_tiny("llama")
    Sweep(model, ids, folder=tmp_path, also={"calibration": "a"}).run([sparse(model, [2])])
    other: dict[str, Any] = {"model": model, "batch": ids, "also": {"calibration": "a"}}
    retrained: dict[str, Any] = {part: make_tiny("llama") for part in ("mlp", "head")}
    with torch.no_grad():
        retrained["mlp"].model.layers[2].mlp.up_proj.weight[3, 3] += 0.01
        retrained["head"].lm_head.weight[3, 3] += 0.01
    other |= {
        "text": {"batch": ids.flip(1)},
        "model": {"model": make_tiny("llama", seed=1)},
        "mlp": {"model": retrained["mlp"]},
        "head": {"model": retrained["head"]},
        "dtype": {"model": make_tiny("llama").double()},
        "calibration": {"also": {"calibration": "b"}},
    }[what]
    taken: list[str] = []
    Sweep(**other, folder=tmp_path).run([sparse(other["model"], [2], taken)])
    assert len(taken) == 1


# Numbers that are none.


def test_a_change_that_diverges_is_told_and_the_sweep_goes_on(ids: torch.Tensor, tmp_path: Path) -> None:
    model = make_tiny("llama")

    def wreck(layer: int, factor: float) -> Job:
        chosen = [p for p in find_projections(wrap(model)) if p.layer == layer]
        return Job(f"wrecked {layer}", layer, weights=lambda: {p: p.weight(model) * factor for p in chosen})

    wrecked = [wreck(1, math.nan), wreck(2, math.inf)]
    good = [sparse(model, [1]), sparse(model, [3])]
    wanted = really("llama", good, ids)
    for _ in range(2):
        found = Sweep(model, ids, folder=tmp_path).run([*wrecked, *good])
        for job in wrecked:
            assert not np.isfinite(found[job.key].windows).any()
            assert math.isnan(found[job.key].drift)
        assert_all_agree(found, wanted)
    for line in next(tmp_path.rglob("*.jsonl")).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_loss_that_overflows_is_infinite_or_nan_and_no_error(ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    p = next(p for p in find_projections(wrap(model)) if p.name == "model.layers.2.mlp.down_proj")
    found = Sweep(model, ids).run([Job("huge", 2, weights=lambda: {p: torch.full_like(p.weight(model), 1e38)})])
    assert not np.isnan(found[DENSE].windows).any()
    assert found["huge"].windows.shape == (3,)


@pytest.mark.parametrize("layer", [0, 3])
def test_a_dense_model_with_nan_is_refused_and_the_layer_named(layer: int, ids: torch.Tensor, tmp_path: Path) -> None:
    model: Any = make_tiny("llama")
    with torch.no_grad():
        model.model.layers[layer].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=rf"layer {layer} \(window 0"):
        Sweep(model, ids, folder=tmp_path).run([sparse(model, [2])])
    assert not list(tmp_path.iterdir())
    assert hooks_of(model) == 0


def test_a_dense_model_whose_head_overflows_is_refused(ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.inf)
    with pytest.raises(LyapunovPruneError, match="window 0 of token ids"):
        Sweep(model, ids).run([])


def test_bad_ids_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="vocabulary"):
        Sweep(make_tiny("llama"), torch.full((1, 8), 97), folder=tmp_path / "x")
    assert not (tmp_path / "x").exists()


# Two processes.

SCRIPT = """
import json, os, sys, time
from pathlib import Path
sys.path[:0] = {tests!r}
import torch
from helpers import make_tiny
from test_sweep import removed, sparse
from lyapunov_prune.sensitivity.sweep import Sweep

folder, rank = Path({folder!r}), os.environ["RANK"]
model, ids = make_tiny("llama"), torch.randint(97, (3, 40), generator=torch.Generator().manual_seed(1))
for name in ("fresh", "half"):
    taken = []
    jobs = [sparse(model, [k], taken) for k in range(6)]
    if name == "half" and rank == "1":
        time.sleep(2)  # late, as after a slow load: what the other has done by then changes nothing
    sweep = Sweep(model, ids, folder=folder / name)
    found = [sweep.run(jobs), sweep.run([removed(2), *jobs])]
    outcomes = {{key: [o.windows.tolist(), o.drift] for run in found for key, o in run.items()}}
    (folder / f"{{name}}-{{rank}}.json").write_text(json.dumps([taken, outcomes]))
"""


@pytest.mark.slow
def test_two_processes_share_the_work(ids: torch.Tensor, tmp_path: Path) -> None:
    model = make_tiny("llama")
    interrupted(model, ids, tmp_path / "half", 2)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=[str(p) for p in Path(__file__).parents[:2]], folder=str(tmp_path)))
    done = launched_twice(script)
    assert done.returncode == 0, done.stderr
    wanted = Sweep(model, ids).run([*(sparse(model, [k]) for k in range(LAYERS)), removed(2)])
    for name, expected in (("fresh", range(LAYERS)), ("half", range(2, LAYERS))):
        taken, outcomes = zip(*(json.loads((tmp_path / f"{name}-{r}.json").read_text()) for r in "01"), strict=True)
        assert sorted(taken[0] + taken[1]) == [f"sparse {k}" for k in expected]  # each once in all
        assert all(taken)
        assert outcomes[0] == outcomes[1]
        assert outcomes[0].keys() == wanted.keys()
        for key, (windows, drift) in outcomes[0].items():
            assert_agree(Outcome(np.array(windows), drift), wanted[key])
