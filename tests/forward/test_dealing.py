"""Windows dealt out to two processes of one launch: what each measures with the other is what one measures alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import launched_twice, make_tiny
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.forward import dealing
from lyapunov_prune.forward.dealing import dealt, summed
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.launched import alone
from lyapunov_prune.predictions.divergence import skip_divergence, sublayer_divergence
from lyapunov_prune.profiles.influence import sublayer_influence
from lyapunov_prune.profiles.sublayer_growth import sublayer_growth
from lyapunov_prune.ranking.angular import angular_distance
from lyapunov_prune.results.encoding import encode

SCRIPT = """
import sys
sys.path[:0] = {tests!r}
from forward.test_dealing import launched
launched({folder!r})
"""
ROUNDED = 1e-12  # relative, where sums of each process are added
SUMMED: set[str] = set()


def text() -> torch.Tensor:
    """Five windows: the shares of two processes are not equal."""
    return torch.randint(96, (5, 24), generator=torch.Generator().manual_seed(3))


def measured(folder: Path) -> dict[str, Callable[[], Any]]:
    """Every measurement that the processes share, by name; `folder` keeps what is kept."""
    model, ids = make_tiny("llama"), text()
    return {
        "perplexity": lambda: lp.perplexity(model, ids),
        "contraction": lambda: lp.measure_contraction(model, ids, seeds=(0, 1), batch_size=2),
        "derivative": lambda: lp.measure_contraction(model, ids, seeds=(0,), method="jvp"),
        "influence": lambda: lp.block_influence(model, ids, batch_size=2),
        "sublayer influence": lambda: sublayer_influence(model, ids),
        "growth": lambda: sublayer_growth(model, ids, seeds=(0,)),
        "angular": lambda: angular_distance(model, ids),
        "kl": lambda: skip_divergence(model, ids),
        "kl of attention": lambda: sublayer_divergence(model, ids, "attention"),
    }


def broken() -> PreTrainedModel:
    """A model in which the embedding of a token is NaN, which the windows 1 and 4 alone contain."""
    model: Any = make_tiny("llama")
    model.model.embed_tokens.weight.data[7] = torch.nan
    return model


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
    with pytest.MonkeyPatch.context() as patch:  # the fault that sums must not survive: a window is dealt twice
        patch.setattr(dealing, "_numbered", lambda windows: [*enumerate(windows), (len(windows), windows[0])])
        found["fault"] = outcome(lambda: lp.perplexity(make_tiny("llama"), text()))
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("launched")
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
    for name, measure in measured(tmp_path).items():
        wanted = outcome(measure)
        assert isinstance(wanted, dict), wanted
        for found in both:
            off = away(found[name], wanted)
            assert off <= (ROUNDED if name in SUMMED else 0), f"{name}: {off}"


def test_each_window_is_dealt_to_one_process_and_a_window_dealt_twice_is_seen(both: list[dict[str, Any]]) -> None:
    for found in both:
        assert found["sent"] == [(0, 2), (2, 2), (4, 1)]
        assert found["alone"] == [f"{both.index(found)}"] * 5
    assert [found["seen"] for found in both] == [[0, 4], [2]]
    alone_found = outcome(lambda: lp.perplexity(make_tiny("llama"), text()))
    assert all(away(found["fault"], alone_found) > ROUNDED for found in both)


def test_the_error_of_a_window_is_raised_in_every_process(both: list[dict[str, Any]]) -> None:
    wanted = outcome(failing())
    assert wanted.startswith(NonFiniteError.__name__)
    for found in both:
        assert found["not finite"] == wanted
        assert "different models or texts" in found["different texts"]
        assert "step 0 and step 1" in found["different steps"]


def test_a_process_by_itself_has_all_windows_and_its_own_sums() -> None:
    reading, sums = read(wrap(make_tiny("llama")), text()), torch.ones(3)
    assert dealt(reading, 2, lambda first, ids: (first, len(ids)), "parts") == [(0, 2), (2, 2), (4, 1)]
    summed(reading.model, sums)
    assert sums.tolist() == [1, 1, 1]
