"""What commands make of their options: model and text, a profile, refusals before minutes of measuring."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lyapunov_prune.errors import LyapunovPruneError

if TYPE_CHECKING:  # a usage error must not wait for torch
    from lyapunov_prune.allocation.allocation import Allocation
    from lyapunov_prune.data.batch import TokenBatch
    from lyapunov_prune.models.loading import Loaded
    from lyapunov_prune.profiles.contraction import ContractionProfile
    from lyapunov_prune.profiles.profile import LayerProfile
    from lyapunov_prune.ranking.angular import AngularDistance
    from lyapunov_prune.ranking.oracle import GreedyRemoval
    from lyapunov_prune.ranking.ranking import LayerRanking
    from lyapunov_prune.results.result import Result

_JACOBIAN_TOKENS = 64
_JACOBIAN = {"steps": 12, "probes": 8, "seed": 0}


def load_inputs(
    model: str,
    text: str,
    tokens: int,
    context: int,
    device: str,
    dtype: str | None,
    bos: bool | None,
    offline: bool,
    split: str = "calibration",
    merge_adapter: bool = False,
) -> tuple[Loaded, TokenBatch]:
    from lyapunov_prune.data.batch import require_context
    from lyapunov_prune.data.text import require_source
    from lyapunov_prune.models.loading import load

    require_source(text)  # before minutes of loading
    if device == "cuda":  # a process of accelerate launch has one of its own
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    loaded = load(model, dtype=dtype, device=device, offline=offline, merge_adapter=merge_adapter)
    require_context(loaded.structure, context)
    return loaded, load_batch(loaded, text, tokens, context, bos, offline, split)


def load_batch(
    loaded: Loaded, text: str, tokens: int, context: int, bos: bool | None, offline: bool, split: str
) -> TokenBatch:
    from lyapunov_prune.data.batch import as_batch
    from lyapunov_prune.data.text import load_text

    batch = load_text(
        text,
        loaded.tokenizer,
        tokens=tokens,
        context=context,
        split=split,  # type: ignore[arg-type]
        bos=bos,
        offline=offline,
    )
    return as_batch(loaded.model, batch)


def explain(run: Path, loaded: Loaded, batch: TokenBatch, batch_size: int, resume: bool) -> None:
    """Activations on the whole batch, Jacobian norms on the start of its first window: they cost far more a token."""
    from lyapunov_prune.profiles.activations import ActivationStatistics, activation_statistics
    from lyapunov_prune.profiles.jacobian import JacobianNorms, sublayer_jacobians
    from lyapunov_prune.results.once import once

    once(
        run / "activations.json",
        ActivationStatistics,
        batch.measured_on(loaded.model),
        {},
        lambda: activation_statistics(loaded.model, batch, batch_size=batch_size),
        resume=resume,
    )
    few = replace(batch, ids=batch.ids[:1, :_JACOBIAN_TOKENS])
    once(
        run / "jacobian.json",
        JacobianNorms,
        few.measured_on(loaded.model),
        _JACOBIAN,
        lambda: sublayer_jacobians(loaded.model, few, **_JACOBIAN),
        resume=resume,
    )


def profile_model(
    loaded: Loaded,
    batch: TokenBatch,
    batch_size: int,
    seeds: int,
    seed: int,
    epsilon: float = 1e-2,
    method: Any = "difference",
    pooling: Any = "energy",
) -> LayerProfile:
    from lyapunov_prune.profiles.profile import profile_layers

    return profile_layers(
        loaded.model,
        batch,
        epsilon=epsilon,
        seeds=range(seed, seed + seeds),
        method=method,
        pooling=pooling,
        batch_size=batch_size,
    )


# Criteria that go by more than a profile holds; the last two choose a whole set, not layer by layer.
MEASURED_CRITERIA = ("kl", "oracle", "angular")


def measure_ranking(
    loaded: Loaded,
    batch: TokenBatch,
    what: str,
    criterion: str,
    alpha: float,
    remove: int | None,
    batch_size: int,
    seeds: int,
    seed: int,
    *,
    run: Path | None,
    resume: bool,
) -> LayerRanking | GreedyRemoval | AngularDistance:
    """Measure what the criterion goes by, and rank; the measurement is kept in `run`."""
    from lyapunov_prune.predictions.divergence import skip_divergence
    from lyapunov_prune.profiles.sublayer_influence import sublayer_influence
    from lyapunov_prune.ranking.angular import angular_distance
    from lyapunov_prune.ranking.kl import rank_by_divergence
    from lyapunov_prune.ranking.oracle import greedy_removal
    from lyapunov_prune.ranking.ranking import rank_layers, rank_sublayers

    measured: Result
    ranking: LayerRanking | GreedyRemoval | AngularDistance
    if what != "layers":
        name = "sublayers.json"
        measured = found = sublayer_influence(loaded.model, batch, batch_size=batch_size)
        ranking = rank_sublayers(found, what)
    elif criterion == "kl":
        name = "divergence.json"
        measured = divergence = skip_divergence(loaded.model, batch, batch_size=batch_size)
        ranking = rank_by_divergence(divergence)
    elif criterion == "oracle":
        assert remove is not None
        name = "oracle.json"
        jobs = run / "jobs" / "oracle" if run else None
        measured = ranking = greedy_removal(
            loaded.model, batch, remove, folder=jobs, resume=resume, batch_size=batch_size
        )
    elif criterion == "angular":
        name = "angular.json"
        measured = ranking = angular_distance(loaded.model, batch, batch_size=batch_size)
    else:
        name = "profile.json"
        measured = profile = profile_model(loaded, batch, batch_size, seeds, seed)
        ranking = rank_layers(profile.contraction, profile.influence, criterion=criterion, alpha=alpha, seed=seed)
    if run is not None:
        measured.save(run / name)
    return ranking


def require_known_count(criterion: str, remove: int | None, keep_period: bool = False) -> None:
    """Some criteria give no order of all layers: they must know how many go."""
    how = {"oracle": "searches step by step", "angular": "removes a run of layers"}.get(criterion)
    if how and remove is None:
        raise LyapunovPruneError(f"criterion {criterion} {how}; give --remove N with it")
    if how and keep_period:
        raise LyapunovPruneError(f"criterion {criterion} {how}, not periods; leave out --keep-period")


def require_budget(max_kl: float, what: str, otherwise: bool) -> None:
    """`otherwise`: something else that is given says what goes already."""
    if not max_kl > 0:
        raise LyapunovPruneError(f"--max-kl {max_kl:g} removes nothing; give a number above 0, in nats a token")
    if otherwise or what != "layers":
        raise LyapunovPruneError(
            "--max-kl says how many layers of a MODEL go; give it without --remove, --profile, --keep-period and --what"
        )


def require_what(what: str, ranked_by: str | None) -> None:
    """Before minutes of measuring, as below: `ranked_by` is None where nothing is ranked."""
    from lyapunov_prune.pruning.plan import FIELDS

    if what not in FIELDS:
        raise LyapunovPruneError(f"unknown --what {what!r}; give one of {', '.join(FIELDS)}")
    if what != "layers" and ranked_by not in (None, "bi"):
        raise LyapunovPruneError(f"--what {what} is ranked by Block Influence only; give --criterion bi with it")


def require_criterion(criterion: str, alpha: float) -> None:
    """The ranking would refuse the same."""
    from lyapunov_prune.ranking.ranking import CRITERIA

    known = (*CRITERIA, *MEASURED_CRITERIA)
    if criterion not in known:
        raise LyapunovPruneError(f"unknown criterion {criterion!r}; give one of {', '.join(known)}")
    if not 0 <= alpha <= 1:
        raise LyapunovPruneError(f"alpha {alpha:g} is outside [0, 1]; give a weight between them")


def require_studies(study: str) -> tuple[str, ...]:
    """The names in a list such as `group,layer`; `all` stands for every one."""
    from lyapunov_prune.sensitivity.studies import STUDIES

    names = tuple(STUDIES) if study == "all" else tuple(name.strip() for name in study.split(","))
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        raise LyapunovPruneError(f"unknown study {unknown[0]!r}; give all, or some of {', '.join(STUDIES)}")
    return names


def require_count(remove: int, layers: int, what: str) -> None:
    """Before minutes of measuring: the plan would refuse the same."""
    most = layers - 1 if what == "layers" else layers
    if not 1 <= remove <= most:
        raise LyapunovPruneError(f"cannot remove {remove} of {layers} layers; give 1 to {most}")


def parse_pattern(pattern: str | None) -> tuple[int, int] | None:
    if pattern is None:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", pattern)
    if not found:
        raise LyapunovPruneError(f"--pattern {pattern!r} is no pattern; write it as 2:4, 2 of 4 kept")
    return int(found[1]), int(found[2])


def chosen_allocation(allocation: str) -> str | Allocation:
    """A schedule's name, or the Allocation in a file of that name."""
    from lyapunov_prune.allocation.allocation import Allocation

    return Allocation.load(allocation) if Path(allocation).is_file() else allocation


def profile_for(
    schedule: str | Allocation, loaded: Loaded, batch: TokenBatch, batch_size: int
) -> ContractionProfile | None:
    """The contraction profile that the schedule goes by; None where it needs none."""
    from lyapunov_prune.allocation.schedules import SCHEDULES

    if not isinstance(schedule, str) or SCHEDULES[schedule].needs != "profile":
        return None
    return profile_model(loaded, batch, batch_size, 2, 0).contraction


def layer_indices(layers: str) -> list[int]:
    try:
        return [int(part) for part in layers.split(",")]
    except ValueError:
        raise LyapunovPruneError(f"--layers {layers!r} is no list of numbers; write it as 3,7") from None


def run_folder(output: Path | None, model: str) -> Path:
    return output or Path("runs") / re.sub(r"[^\w.-]+", "-", model).strip("-.")


def draw_report(run: Path) -> None:
    """Figures and page of the results in `run`, without loading torch for a usage error."""
    from lyapunov_prune.report.page import write_report

    write_report(run)
