"""Windows dealt out to two processes of one launch: what each measures with the other is what one measures alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import launched_twice, make_tiny, make_tokenizer, moe
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.feedback import fed_forward, written_by_itself
from lyapunov_prune.budget.fisher import fisher, matrices_of
from lyapunov_prune.calibration.downstream import token_weights
from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.forward import dealing
from lyapunov_prune.forward.dealing import dealt, shared_out, summed
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.ggml import Kind
from lyapunov_prune.models.how import How
from lyapunov_prune.models.launched import alone
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.predictions.divergence import kl_by_window, skip_divergence, sublayer_divergence
from lyapunov_prune.predictions.history import history_divergence
from lyapunov_prune.profiles.expert_use import expert_use
from lyapunov_prune.profiles.influence import sublayer_influence
from lyapunov_prune.ranking.angular import angular_distance
from lyapunov_prune.ranking.best import best_removal
from lyapunov_prune.ranking.oracle import greedy_removal
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.sensitivity.sweep import Job, Sweep

SCRIPT = """
import sys
sys.path[:0] = {tests!r}
from forward.test_dealing import launched
launched({folder!r})
"""
# Relative, where sums of each process are added.
SUMMED = {
    **dict.fromkeys(("expert use", "norms", "explain"), 1e-12),
    **dict.fromkeys(("gptq", "feedback", "best, mended", "streamed"), 1e-5),  # float32
    "sweep of a layer": 1e-9,  # 1 − CKA
    **dict.fromkeys(("fisher", "fisher, streamed"), 1e-4),  # summed in float32
}
FAULTY = ("perplexity", "influence", "norms")
pytestmark = pytest.mark.xdist_group("dealing")  # one process makes `both`, not each


def text(windows: int = 5) -> torch.Tensor:
    """Windows whose shares by two processes are not equal."""
    return torch.randint(96, (windows, 24), generator=torch.Generator().manual_seed(3))


def measured(folder: Path) -> dict[str, Callable[[], Any]]:
    """Every measurement that the processes share, by name; `folder` keeps what is kept."""
    model, ids = make_tiny("llama"), text()
    other = lp.compress(model, method="rtn", bits=3).model
    reading, prompts, projections = read(wrap(model), ids), ids[:, :8], find_projections(wrap(model))

    def gptq() -> dict[str, Any]:
        return named(lp.compress(model, ids, method="gptq", bits=4).model.state_dict())

    def weights() -> dict[str, Any]:
        return named({name: torch.cat(calls) for name, calls in token_weights(reading, projections).items()})

    def fed() -> dict[str, Any]:
        large, small = (make_tiny("llama", intermediate_size=64) for _ in range(2))  # two blocks in a row of Q4_0
        types = {n: How(Kind.Q4_0, np.ones(64)) for n, p in large.named_parameters() if p.shape[1:] == (64,)}
        assert types
        fed_forward(written_by_itself(read(wrap(large), ids)), BLOCKS, types, small)
        return named(small.state_dict())

    def streamed() -> dict[str, Any]:
        files = lp.load_streamed(folder / "saved")
        losses = lp.perplexity(files, ids).windows
        return {"kl": skip_divergence(files, ids).kl, "bi": lp.block_influence(files, ids).influence, "loss": losses}

    def from_files() -> dict[str, Any]:
        files = lp.load_streamed(folder / "saved")
        kl, loss = kl_by_window(read(files, ids), read(wrap(other), ids))
        return {"kl": kl, "loss": loss, **named(dict(fisher(read(files, ids), matrices_of(files.model), 0)))}

    return {
        "perplexity": lambda: lp.perplexity(model, ids),
        "contraction": lambda: lp.measure_contraction(model, ids, seeds=(0, 1), batch_size=2),
        "derivative": lambda: lp.measure_contraction(model, ids, seeds=(0,), method="jvp"),
        "influence": lambda: lp.block_influence(model, ids, batch_size=2),
        "sublayer influence": lambda: sublayer_influence(model, ids),
        "angular": lambda: angular_distance(model, ids),
        "kl": lambda: skip_divergence(model, ids),
        "kl of attention": lambda: sublayer_divergence(model, ids, "attention"),
        "kl of a file": lambda: dict(enumerate(kl_by_window(reading, read(wrap(other), ids)))),
        "expert use": lambda: expert_use(moe("mixtral"), ids),
        "streamed": streamed,
        "norms": lambda: named(input_norms(model, ids, projections)),
        "norms of experts": lambda: named(input_norms(mixture := moe("mixtral"), ids, find_projections(wrap(mixture)))),
        "token weights": weights,
        "gptq": gptq,
        "feedback": fed,
        "fisher": lambda: named(dict(fisher(reading, matrices_of(model), 0))),
        "fisher, streamed": from_files,
        "explain": lambda: lp.explain(model, other, ids, batch_size=2),
        "written": lambda: lp.self_generated(model, tokens=80, context=16, batch_size=2, folder=folder).ids.numpy(),
        "generation": lambda: lp.compare_generation(model, other, prompts, steps=3, batch_size=2),
        "history": lambda: history_divergence(model, other, prompts, steps=3, batch_size=2),
        "hierarchy": lambda: lp.probe_layers(model, prompts, change=other, steps=3, batch_size=2),
        "best": lambda: best_removal(model, text(16), 2, folder=folder),
        "best, mended": lambda: best_removal(model, text(32), 1, mend=True, judge=text(9), folder=folder),
        "sweep of a layer": lambda: Sweep(model, ids, folder=folder).run([Job("without", 2, remove=(2,))]),
        "oracle": lambda: greedy_removal(model, ids, 2, folder=folder).losses,
    }


def broken() -> PreTrainedModel:
    """A model in which the embedding of a token is NaN, which the windows 1 and 4 alone contain."""
    model: Any = make_tiny("llama")
    model.model.embed_tokens.weight.data[7] = torch.nan
    return model


def saved(folder: Path) -> None:
    make_tiny("llama").save_pretrained(folder / "saved")
    make_tokenizer().save_pretrained(folder / "saved")


def named(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def outcome(measure: Callable[[], Any]) -> Any:
    try:
        return encode(measure())
    except LyapunovPruneError as error:
        return f"{type(error).__name__}: {error}"


def failing() -> Callable[[], Any]:
    ids = text()
    ids[ids == 7] = 8
    ids[1, 3] = ids[4, 5] = 7
    return lambda: lp.measure_contraction(broken(), ids, seeds=(0,))


def launched(folder: str) -> None:
    """What one of two processes does, with its outcomes in a file."""
    import os

    rank = os.environ["RANK"]
    found = {name: outcome(measure) for name, measure in measured(Path(folder)).items()}
    reading = read(wrap(make_tiny("llama")), text())
    found["not finite"] = outcome(failing())
    seen: list[int] = []
    found["sent"] = dealt(reading, 2, lambda first, ids: seen.append(first) or (first, len(ids)), "parts")
    found["seen"] = seen
    with alone():
        found["alone"] = dealt(reading, 1, lambda first, ids: rank, "alone")
    found["different texts"] = outcome(lambda: lp.perplexity(make_tiny("llama"), (text() + int(rank)) % 97))
    found["different steps"] = outcome(lambda: dealt(reading, 1, lambda first, ids: first, f"step {rank}"))
    with pytest.MonkeyPatch.context() as patch:  # the fault that must be seen: a window is dealt twice

        def twice(reading: Any, parts: Any, *rest: Any) -> list[Any]:
            return shared_out(reading, [*parts, parts[0]], *rest)

        patch.setattr(dealing, "shared_out", twice)
        found["faults"] = {name: outcome(measured(Path(folder))[name]) for name in FAULTY}
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("launched")
    saved(folder)
    script = folder / "script.py"
    tests = [str(p) for p in Path(__file__).parents[1:3]]
    script.write_text(SCRIPT.format(tests=tests, folder=str(folder)))
    done = launched_twice(script)
    assert done.returncode == 0, done.stderr
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in "01"]


def away(found: Any, wanted: Any) -> float:
    """The largest relative difference of two encoded results; infinite where they differ in more than numbers."""
    if isinstance(wanted, float) and isinstance(found, float):
        return abs(found - wanted) / max(abs(wanted), 1e-300)
    if isinstance(wanted, dict) and isinstance(found, dict) and found.keys() == wanted.keys():
        return max((away(found[key], value) for key, value in wanted.items()), default=0.0)
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        return max(map(away, found, wanted), default=0.0)
    return 0.0 if found == wanted else np.inf


def test_what_two_processes_measure_together_is_what_one_measures(both: list[dict[str, Any]], tmp_path: Path) -> None:
    saved(tmp_path)
    for name, measure in measured(tmp_path).items():
        wanted = outcome(measure)
        assert not isinstance(wanted, str), wanted
        for found in both:
            off = away(found[name], wanted)
            assert off <= SUMMED.get(name, 0), f"{name}: {off}"


def test_each_window_is_dealt_to_one_process_and_a_window_dealt_twice_is_seen(
    both: list[dict[str, Any]], tmp_path: Path
) -> None:
    for rank, found in enumerate(both):
        assert found["sent"] == [(0, 2), (2, 2), (4, 1)]
        assert found["alone"] == [f"{rank}"] * 5
    assert [found["seen"] for found in both] == [[0, 4], [2]]
    for name in FAULTY:
        wanted = outcome(measured(tmp_path)[name])
        assert all(away(found["faults"][name], wanted) > 1e-3 for found in both)


def test_the_error_of_a_window_is_raised_in_every_process(both: list[dict[str, Any]]) -> None:
    wanted = outcome(failing())
    assert wanted.startswith(NonFiniteError.__name__)
    for found in both:
        assert found["not finite"] == wanted
        assert "different models or texts" in found["different texts"]
        assert "step 0 of 5 and step 1 of 5" in found["different steps"]


def test_a_process_by_itself_has_all_windows_and_its_own_sums() -> None:
    reading, sums = read(wrap(make_tiny("llama")), text()), torch.ones(3)
    assert dealt(reading, 2, lambda first, ids: (first, len(ids)), "parts") == [(0, 2), (2, 2), (4, 1)]
    summed(reading.model, sums)
    assert sums.tolist() == [1, 1, 1]
