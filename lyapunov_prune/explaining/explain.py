"""Measure where the error of a compressed model comes from, all of it from shared forwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from lyapunov_prune.arguments import Count
from lyapunov_prune.bounds.matrix_errors import MatrixErrors, measure_matrix_errors
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.explaining.blame import Blame, predictions
from lyapunov_prune.explaining.decomposition import ErrorSums, difference
from lyapunov_prune.explaining.explanation import Explanation, blamed_layers
from lyapunov_prune.explaining.pair import Side, pair_up
from lyapunov_prune.explaining.sublayers import SublayerSums
from lyapunov_prune.explaining.token_kinds import TokenSums
from lyapunov_prune.forward.reading import Readable
from lyapunov_prune.forward.rounding import roughness
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.forward.states import predicting
from lyapunov_prune.models.decoder import InMemory, takes_models
from lyapunov_prune.models.projections import Projection, find_projections
from lyapunov_prune.models.quantised import UNSEEN_ROUNDING
from lyapunov_prune.models.structure import identify, in_eval_mode
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.progress import track
from lyapunov_prune.results.result import ModelIdentity

# A layer that runs alone may round otherwise than in its model, by so many units.
_UNITS = 16


@takes_models
@in_eval_mode
@torch.no_grad()
def explain(
    dense: InMemory,
    compressed: InMemory,
    batch: Readable,
    *,
    kept: Sequence[int] | None = None,
    profile: ContractionProfile | None = None,
    batch_size: Count = 1,
) -> Explanation:
    """Where the error of `compressed` comes from: see Explanation. Only forwards are run, so weights may be packed.

    `kept` are the dense model's numbers of the layers of `compressed`, if some are gone; None takes them from the
    provenance of its checkpoint. `profile` is one of the dense model, whose ρ is set beside that of this error.

    Cost: `cost.forwards(L)` forwards of every window, fewer where layers are equal: both models once, every layer of
    `compressed` on both states and of `dense` on the other's, for both blames half a forward a layer, each begun at a
    kept state; every MLP of `compressed` on the dense state, and `dense` once more for the matrices of the layers to
    blame. Memory: both models, the states of
    `batch_size` windows at all boundaries, and a block of logits.

    Raises NonFiniteError naming the layer where a state of either model is not finite, and LyapunovPruneError for two
    models that cannot be compared (`pair_up`) or a profile of another model.
    """
    first, second = sides = pair_up(dense, compressed, batch, kept)
    reading, layers = first.reading, first.total
    on, identity = reading.measured_on(), identify(second.reading.model)
    if profile is not None and not profile.measured_on.model.same_as(on.model):
        raise LyapunovPruneError(f"the profile is of {profile.measured_on.model.name}; give one of the dense model")
    sums, inner, blame, tokens = ErrorSums(layers), SublayerSums(sides), Blame(layers), TokenSums(reading)
    scorers = [side.reading.scorer for side in sides]
    for ids in track(reading.windows(batch_size), "explaining"):
        _explain_windows(sides, scorers, ids, sums, inner, blame, tokens)
    mean = blame.sums / blame.positions
    rounding = max(_rounding(side, reading.windows(1)[0]) for side in sides)
    return Explanation(
        kept=second.layers,
        size=sums.size,
        error=sums.error,
        energy=sums.energy,
        along=sums.along,
        passed=sums.passed,
        off=np.sqrt(sums.off / sums.size[1:]),
        rounding=rounding,
        kl=float(mean[1, 0]),
        loss=float(mean[1, 1]),
        dense_loss=float(mean[0, 1]),
        kl_only=mean[2::2, 0].copy(),
        loss_only=mean[2::2, 1].copy(),
        kl_but=mean[3::2, 0].copy(),
        loss_but=mean[3::2, 1].copy(),
        rho=np.full(layers, np.nan) if profile is None else profile.rho,
        settings=_other_settings(on.model, identity),
        compressed=identity,
        measured_on=on,
        matrices=_matrices(sides, blamed_layers(mean[1, 0] - mean[3::2, 0]), batch_size),
        sublayers=inner.result(rounding),
        tokens=tokens.result(),
    )


def _matrices(sides: tuple[Side, Side], layers: Sequence[int], batch_size: int) -> MatrixErrors | None:
    """The errors of the matrices of these layers that differ; None where none does, or they cannot be compared."""
    dense, changed = (side.reading.decoder for side in sides)
    try:
        ours, theirs = find_projections(dense), find_projections(changed)
    except LyapunovPruneError:  # packed for their library's kernels, adapters, or no matrices at all
        return None
    given = {_place(p, sides[1].layers[p.layer]): p.weight(changed.model) for p in theirs}
    pairs = [(p, p.weight(dense.model), given.get(_place(p, p.layer))) for p in ours if p.layer in layers]
    same_shape = [(p, W, W2.to(W.device)) for p, W, W2 in pairs if W2 is not None and W2.shape == W.shape]
    written = {p: W2 for p, W, W2 in same_shape if not torch.equal(W2, W)}
    return measure_matrix_errors(sides[0].reading, written, batch_size) if written else None


def _place(p: Projection, layer: int) -> tuple[int, str, int | None, int | None]:
    """Which matrix it is, in the dense model's number of its layer."""
    return layer, p.component, p.head, p.expert


def _explain_windows(
    sides: tuple[Side, Side],
    scorers: Sequence[Scorer],
    ids: torch.Tensor,
    sums: ErrorSums,
    inner: SublayerSums,
    blame: Blame,
    tokens: TokenSums,
) -> None:
    """Add these windows to all sums."""
    first, second = sides
    with inner.dense.watched() as between, inner.compressed.watched() as moved:
        (dense, final), (changed, changed_final) = (side.states(ids) for side in sides)
    changed = [h.to(dense[0].device) for h in changed]
    sums.add_states(dense, changed)
    inner.add_states(dense, changed, (between, moved))
    finals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (this alone compressed, all but this)
    if not torch.equal(dense[0], changed[0]):
        finals[0] = first.finish(0, ids, changed[0]), second.finish(0, ids, dense[0])
    errors = difference(changed, dense)
    for k in range(first.total):
        with inner.compressed.watched() as at_dense:
            of_dense = second.run(k, ids, dense[k])
        with inner.compressed.watched() as at_changed:
            g = of_dense, second.run(k, ids, changed[k])
        sums.add_layer(k, (errors[k], errors[k + 1]), dense[k + 1], g)
        inner.add_layer(
            k,
            ids,
            ((dense[k], between.get(k), dense[k + 1]), (changed[k], moved.get(k, changed[k]), changed[k + 1])),
            ((at_dense.get(k, dense[k]), g[0]), (at_changed.get(k, changed[k]), g[1])),
        )
        if not torch.equal(g[0].to(dense[0].device), dense[k + 1]):
            f = first.run(k, ids, changed[k])
            finals[k + 1] = first.finish(k + 1, ids, g[0]), second.finish(k + 1, ids, f)
    # The final norm and the head are of the other model than the layers before them.
    finals[first.total + 1] = first.finish(first.total, ids, changed[-1]), second.finish(first.total, ids, dense[-1])
    read_by = {part: [*zip(scorers, map(predicting, pair), strict=True)] for part, pair in finals.items()}
    read_by[first.total + 1].reverse()
    ends = [(scorer, predicting(state)) for scorer, state in zip(scorers, (final, changed_final), strict=True)]
    others = [ends[1], *chain.from_iterable(read_by.values())]
    found, turned = predictions(ends[0], others, ids[:, 1:].flatten())
    blame.add(found, list(read_by))
    tokens.add(turned, found[1, 0], ids)


def _rounding(side: Side, ids: torch.Tensor) -> float:
    """How far two forwards of one layer may be apart, over the state that leaves it."""
    model = side.reading.model
    unit = torch.finfo(roughness(side.reading.structure, ids, model.dtype).coarsest).eps
    return _UNITS * max(unit, UNSEEN_ROUNDING if side.reading.decoder.packed else 0.0)


def _other_settings(dense: ModelIdentity, compressed: ModelIdentity) -> str:
    """What to say of settings that differ, where both models have the same layers."""
    other = compressed.other_setting(dense) if dense.num_layers == compressed.num_layers else ""
    common = dense.weights.keys() & compressed.weights.keys()
    same = dense.architecture == compressed.architecture and any(
        dense.weights[dtype] == compressed.weights[dtype] for dtype in common
    )
    return other and f"{'the weights are the same, and ' if same else ''}the settings differ{other}"
