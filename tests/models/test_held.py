"""Two threads on one model: one of them is refused, at once, and the model is left as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import hooks_of, make_tiny
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.models.hooked import held

IDS = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything that a measurement may put on a model and forget."""
    modules = list(model.modules())
    patched = [module for module in modules if "forward" in vars(module)]
    parameters = [(name, id(p)) for name, p in model.named_parameters()]
    return hooks_of(model), len(patched), [module.training for module in modules], parameters


@contextmanager
def at_work(model: PreTrainedModel, measure: Callable[[PreTrainedModel], Any]) -> Iterator[Callable[[], Any]]:
    """`measure` in another thread, stopped in the middle of a forward; what is yielded lets it end."""
    reached, go_on = threading.Event(), threading.Event()

    def stop(module: Any, args: Any) -> None:
        reached.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(1) as other:
        handle = model.base_model.layers[3].register_forward_pre_hook(stop)  # type: ignore[union-attr, operator, index]
        try:
            running = other.submit(measure, model)
            assert reached.wait(60)

            def end() -> Any:
                go_on.set()
                return running.result()

            yield end
        finally:
            go_on.set()
            running.exception()
            handle.remove()


@pytest.mark.parametrize("training", [False, True])
def test_of_two_threads_on_one_model_one_is_refused(training: bool) -> None:
    model = make_tiny("llama").train(training)
    before, alone = state_of(model), lp.predictions.skip_divergence(model, IDS)
    with at_work(model, lambda m: lp.predictions.skip_divergence(m, IDS)) as end:
        with pytest.raises(lp.LyapunovPruneError, match=r"another thread.*LlamaForCausalLM"):
            lp.block_influence(model, IDS)
        assert end().kl.tolist() == alone.kl.tolist()
    assert state_of(model) == before
    lp.block_influence(model, IDS)  # now it is free


def test_threads_that_begin_together() -> None:
    model = make_tiny("llama")
    before, alone = state_of(model), lp.predictions.skip_divergence(model, IDS).kl.tolist()
    start = threading.Barrier(4)

    def measure() -> list[float] | str:
        start.wait()
        try:
            return lp.predictions.skip_divergence(model, IDS).kl.tolist()
        except lp.LyapunovPruneError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        found = [f.result() for f in [pool.submit(measure) for _ in range(4)]]
    assert alone in found
    assert all(one == alone or "another thread" in one for one in found)
    assert state_of(model) == before


def test_threads_on_models_of_their_own() -> None:
    models = [make_tiny("llama", seed=seed) for seed in (0, 1)]
    wanted = [lp.block_influence(model, IDS).influence.tolist() for model in models]
    with at_work(models[0], lambda m: lp.block_influence(m, IDS)) as end:
        assert lp.block_influence(models[1], IDS).influence.tolist() == wanted[1]
        assert end().influence.tolist() == wanted[0]


MEASUREMENTS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "allocate": lambda m: lp.allocate(m, "uniform", 0.5),
    "angular_distance": lambda m: lp.ranking.angular_distance(m, IDS),
    "approximate": lambda m: lp.bounds.approximate(m, {}).__enter__(),
    "check_bounds": lambda m: lp.check_bounds(m, IDS, sparsity=0.5),
    "check_written": lambda m: lp.bounds.check_written(m, m, IDS),
    "compare_generation": lambda m: lp.compare_generation(m, m, IDS),
    "compress": lambda m: lp.compress(m, method="magnitude", sparsity=0.5),
    "greedy_removal": lambda m: lp.ranking.greedy_removal(m, IDS, 1),
    "heal": lambda m: lp.heal(m, m, IDS.repeat(4, 1), steps=1),
    "measure_contraction": lambda m: lp.measure_contraction(m, IDS),
    "measure_sensitivity": lambda m: lp.measure_sensitivity(m, IDS, studies=["layer"]),
    "measure_speed": lambda m: lp.measure_speed({"a": m}, prompt=8, steps=2, repeats=1),
    "perplexity": lambda m: lp.perplexity(m, IDS),
    "probe_layers": lambda m: lp.probe_layers(m, IDS),
    "rank": lambda m: lp.rank(m, IDS, criterion="random"),
    "remove_layers": lambda m: lp.remove_layers(m, [1]),
    "skip_divergence": lambda m: lp.predictions.skip_divergence(m, IDS),
    "sublayer_influence": lambda m: lp.profiles.sublayer_influence(m, IDS),
    "verify_removal": lambda m: lp.verify_removal(m, m, [1]),
}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_is_refused_while_another_thread_has_the_model(name: str) -> None:
    model = make_tiny("llama")
    with ThreadPoolExecutor(1) as other, held(model):
        error = other.submit(MEASUREMENTS[name], model).exception()
    assert isinstance(error, lp.LyapunovPruneError), error
    assert "another thread" in str(error)


def test_a_block_of_approximate_is_one_threads(llama: PreTrainedModel) -> None:
    with ThreadPoolExecutor(1) as other, lp.bounds.approximate(llama, lambda p, W: 0 * W):
        lp.perplexity(llama, IDS)  # the thread of the block goes on
        assert "another thread" in str(other.submit(lp.perplexity, llama, IDS).exception())
    lp.perplexity(llama, IDS)
