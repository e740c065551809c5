"""What the program does for a family beside removing layers: each feature tried and proven, or refused with why."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from families.zoo import SMALL, VOCABULARY
from helpers import make_tokenizer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export import compact_gate
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_gate import verify_compact
from lyapunov_prune.healing import heal
from lyapunov_prune.joint import search
from lyapunov_prune.joint.recovery import RecoveryRecipe
from lyapunov_prune.joint.run import remove_jointly
from lyapunov_prune.mending.mend import fit_mends
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.mixtures import find_mixtures
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.plan import PruningPlan, as_plan
from lyapunov_prune.pruning.removal import check_removal
from lyapunov_prune.pruning.surgery import Operation, cut
from lyapunov_prune.pruning.width import choose_channels

T = TypeVar("T")
YES, NONE, WRONG = "yes", "-", "WRONG"
GONE = 3  # the layer that leaves


def _ids(windows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (windows, tokens), generator=torch.Generator().manual_seed(seed))


def _calibration(model: PreTrainedModel) -> bool:
    """Half of every row of every matrix goes, by the norms of what enters it."""
    compressed = lp.compress(model, _ids(3, 24), method="wanda", sparsity=0.5)
    halved = (abs(m.zeros - 0.5) <= 0.5 / m.columns for m in compressed.report.matrices)
    return all(halved) and bool(compressed.model(_ids(1, 24), use_cache=False).logits.isfinite().all())


def _compact(model: PreTrainedModel) -> bool:
    """Without one attention the model passes the gate of compact checkpoints."""
    cuts, compact = _first(lambda layer: (Cuts((layer,)), make_compact(model, Cuts((layer,)))), (GONE, 2, 7))
    verify_compact(model, compact, cuts, elsewhere=False).require_passed()
    return True


def _joint(model: PreTrainedModel) -> bool:
    """One attention or activation leaves, by a map fitted to a few steps of training; every check of the run holds."""
    names = zip((10, 6, 6), ("learn", "select", "final"), strict=True)
    parts = [TokenBatch(_ids(n, 24, seed), name, "all", bos=False) for seed, (n, name) in enumerate(names)]

    def alone(*args: Any, **options: Any) -> Any:
        return verify_compact(*args, **options, elsewhere=False)

    with (
        tempfile.TemporaryDirectory() as place,
        # Of a model that was never trained the selection set can tell nothing apart.
        mock.patch.object(search, "_selection_error", return_value=0.0),
        mock.patch.object(compact_gate, "verify_compact", alone),
    ):
        quick: dict[str, Any] = {"steps": 1, "recover_steps": 1, "recipe": RecoveryRecipe(rank=2), "seeds": 1}
        slices: Any = tuple(parts)
        run = remove_jointly(model, None, slices, Path(place) / "out", remove=1, folder=Path(place) / "jobs", **quick)
    return sum(run.decision.chosen) == 1


def _width(model: PreTrainedModel) -> bool:
    return _passes(model, choose_channels(model, _ids(3, 24), 0.5))


def _experts(model: PreTrainedModel) -> bool | str:
    """The experts that a ranking names leave every mixture, one of each group of the router's."""
    try:
        mixtures = find_mixtures(find_structure(model))
    except LyapunovPruneError as error:
        if "has experts; " in error.message:
            return NONE
        raise
    ranking: Any = lp.rank(model, _ids(3, 24), what="experts")
    return _passes(model, ranking.plan(mixtures.router.groups))


def _healing(model: PreTrainedModel) -> bool:
    """Low-rank updates of all matrices are trained for two steps, in bfloat16 if that changes little, and merged."""
    student = lp.remove_layers(model, _removable(model))
    settings: dict[str, Any] = {"steps": 2, "rank": 1, "learning_rate": 1e-4}
    with mock.patch.object(heal, "multiplies_bfloat16", return_value=True):
        healed = lp.heal(student, model, _ids(4, 16), judge=_ids(4, 16, 7), **settings)
    finite = healed.model(_ids(1, 16), use_cache=False).logits.isfinite().all()
    return bool(finite) and healed.report.steps == 2


def _mending(model: PreTrainedModel) -> bool:
    """The gap of a removed layer is closed, and the gate holds the map against a hook."""
    gone = _removable(model)
    mends, _ = fit_mends(model, tuple(gone), _ids(16, 16))
    decoder = wrap(model)
    operation = Operation(as_plan(decoder, gone), mends=mends)
    return check_removal(decoder, cut(decoder, operation), operation).passed


def _streamed(model: PreTrainedModel) -> bool:
    """Logits and Block Influence of the model read from its files a layer at a time are those of the one in memory."""
    with tempfile.TemporaryDirectory() as place, quiet():
        model.save_pretrained(place)
        make_tokenizer().save_pretrained(place)
        whole = type(model).from_pretrained(place).eval()
        streamed = lp.load_streamed(place).model
        ids = _ids(2, 24)
        same = torch.allclose(
            streamed(ids, use_cache=False).logits, whole(ids, use_cache=False).logits, rtol=1e-3, atol=1e-3
        )
        try:
            wanted = lp.block_influence(whole, ids).influence
        except LyapunovPruneError:  # not measured in memory either
            return same
        found = lp.block_influence(streamed, ids).influence
    return same and bool(np.allclose(found, wanted, rtol=1e-3, atol=1e-6))


def _passes(model: PreTrainedModel, plan: PruningPlan) -> bool:
    return lp.verify_removal(model, lp.remove_layers(model, plan), plan).passed


def _removable(model: PreTrainedModel) -> list[int]:
    """A layer that this family can lose."""

    def attempt(layer: int) -> list[int]:
        lp.remove_layers(model, [layer])
        return [layer]

    return _first(attempt)


def _first(attempt: Callable[[int], T], layers: tuple[int, ...] = (GONE, 7, 1)) -> T:
    """What `attempt` makes of the first of a few layers that is not refused."""
    refused: LyapunovPruneError | None = None
    for layer in layers:
        try:
            return attempt(layer)
        except LyapunovPruneError as error:
            refused = refused or error
    assert refused is not None
    raise refused


FEATURES: dict[str, Callable[[PreTrainedModel], bool | str]] = {
    "calibration": _calibration,
    "compact": _compact,
    "joint": _joint,
    "width": _width,
    "experts": _experts,
    "low-rank healing": _healing,
    "mending": _mending,
    "streamed": _streamed,
}


# With four experts in two groups, of which a token takes two, none could leave.
MORE_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8)


def judge_features(make: Callable[[], PreTrainedModel]) -> dict[str, str]:
    """Each feature on a new model of the family: "yes", "-" where there is nothing of the kind, or why not."""
    found = {}
    for name, feature in FEATURES.items():
        with mock.patch.dict(SMALL, MORE_EXPERTS if name == "experts" else {}):
            model = make()
        found[name] = _verdict(feature, model)
    return found


def as_of_a_class(error: LyapunovPruneError, model: PreTrainedModel) -> str:
    """The message without the name of the model's class, and without that of a temporary folder."""
    said = re.sub(rf"(this )?\b{type(model).__name__}\b", "this class", str(error))
    return re.sub(rf"{tempfile.gettempdir()}/\w+", "the folder", said)


def _verdict(feature: Callable[[PreTrainedModel], bool | str], model: PreTrainedModel) -> str:
    try:
        found = feature(model)
    except LyapunovPruneError as error:
        return as_of_a_class(error, model).partition("; give one of ")[0]
    except Exception as error:
        return f"{WRONG}: {type(error).__name__}: {error}"[:200]
    return found if isinstance(found, str) else YES if found else f"{WRONG}: the check does not hold"
