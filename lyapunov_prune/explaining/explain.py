"""Measure where the error of a compressed model comes from, all of it from shared forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from lyapunov_prune.arguments import Count
from lyapunov_prune.bounds.matrix_errors import MatrixErrors, joined, measure_matrix_errors
from lyapunov_prune.diagnosis.diagnose import diagnose
from lyapunov_prune.diagnosis.finding import Diagnosis
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.explaining.blame import Blame, predictions
from lyapunov_prune.explaining.decomposition import ErrorSums, difference
from lyapunov_prune.explaining.explanation import Explanation, blamed_layers
from lyapunov_prune.explaining.pair import Side, pair_up
from lyapunov_prune.explaining.token_kinds import TokenSums
from lyapunov_prune.forward.dealing import dealt, summed
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Readable, Reading
from lyapunov_prune.forward.rounding import roughness
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.forward.states import predicting
from lyapunov_prune.models.decoder import Decoder, Streamable, runs_models
from lyapunov_prune.models.gguf_metadata import gguf_family
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.quantised import UNSEEN_ROUNDING
from lyapunov_prune.models.size import stored_size
from lyapunov_prune.models.structure import identify, in_eval_mode, model_name
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.results.history import history_of
from lyapunov_prune.results.result import ModelIdentity

# Rounding of a layer that runs alone may differ from that in its model by this many units.
_UNITS = 16


@runs_models
def explain(
    dense: Streamable,
    compressed: Streamable,
    batch: Readable,
    *,
    kept: Sequence[int] | None = None,
    profile: ContractionProfile | None = None,
    batch_size: Count = 1,
    folder: Path | None = None,
    diagnosis: Diagnosis | None = None,
) -> Explanation:
    """Measure where the error of `compressed` comes from, see Explanation. Only forwards run; weights may be packed.

    `kept` holds the dense model's number of each layer of `compressed`, if some were removed; None takes them from the
    provenance of its checkpoint. `profile` is a contraction profile of the dense model, whose ρ is shown beside that of
    this error. `diagnosis` is that of the two models (`diagnosis.diagnose`), which is made if none is given.

    Cost: at most `forwards(L)` forwards of every window, fewer if some layers are equal. Both models run once;
    every layer of `compressed` runs on both states, and every layer of `dense` on the state of `compressed`; for each
    layer, two half forwards on average (with it alone compressed, and with all but it) begin at a kept state; `dense`
    runs once more for the matrices of the blamed layers. Memory: both models, the states of `batch_size` windows at all
    boundaries, and a block of logits.

    If both models are streamed, all windows pass through one layer of each while it is in memory, so that the files are
    read a few times (`READINGS`). Memory: one layer of each model, and the states of both at all boundaries; if memory
    is short, the states are in a file in `folder` (`room_for`).

    Raises NonFiniteError naming the layer if a state of either model is not finite, and LyapunovPruneError for two
    models that cannot be compared (`pair_up`) or a profile of another model.
    """
    first, second = sides = pair_up(dense, compressed, batch, kept, folder)
    reading, layers = first.reading, first.total
    on, identity = reading.measured_on(), identify(second.reading.model)
    if profile is not None:
        on.model.require(profile.measured_on.model, "the profile", "give one of the dense model")
    if diagnosis is None:
        diagnosis = diagnose(dense, compressed, reading, kept=second.layers)
    sums, blame, tokens = ErrorSums(layers), Blame(layers), TokenSums(reading)
    scorers = [side.reading.scorer for side in sides]
    if scorers[0].reads_as(scorers[1]):
        scorers[1] = scorers[0]

    def explain_windows(first: int, ids: torch.Tensor) -> list[_Seen]:
        return _explain_windows(sides, scorers, ids, sums, blame)

    rise = []
    for risen, turned, diverged, ids in itertools.chain(*dealt(reading, batch_size, explain_windows, "explaining")):
        rise.append(risen)
        tokens.add(turned, diverged, ids)
    summed(reading.model, *(array for each in (sums, blame) for array in vars(each).values()))
    kl, loss = map(float, blame.compressed)
    (kl_only, loss_only), (kl_but, loss_but) = blame.only, blame.but
    kl, kl_only, kl_but = max(0.0, kl), np.maximum(kl_only, 0), np.maximum(kl_but, 0)  # rounding may leave less
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
        kl=kl,
        loss=loss,
        dense_loss=float(blame.dense[1]),
        kl_only=kl_only,
        loss_only=loss_only,
        kl_but=kl_but,
        loss_but=loss_but,
        rho=np.full(layers, np.nan) if profile is None else profile.rho,
        settings=_other_settings(on.model, identity),
        compressed=identity,
        measured_on=on,
        matrices=_matrices(sides, blamed_layers(kl - kl_but), batch_size),
        tokens=tokens.result(),
        diagnosis=diagnosis,
        file_size=_file_size(compressed),
        rise=np.array(rise),
        by_size=[step.kind for step in history_of(compressed.model).steps[-1:]] == ["shrink"],
    )


def _file_size(compressed: Decoder) -> int | None:
    """The bytes of its files; None if a model of its family cannot be written as a GGUF file, or they are not found."""
    try:
        gguf_family(compressed.structure.config)
    except LyapunovPruneError:
        return None
    size = stored_size(model_name(compressed.model), compressed.model)
    return None if size is None else size.bytes


def _matrices(sides: tuple[Side, Side], layers: Sequence[int], batch_size: int) -> MatrixErrors | None:
    """The errors of the matrices of `layers` that differ; None if none does, or they cannot be compared."""
    reading, decoders = sides[0].reading, [side.reading.decoder for side in sides]
    try:
        ours, theirs = map(find_projections, decoders)
    except LyapunovPruneError:  # packed for kernels of their library, adapters, or no matrices at all
        return None
    given = {_place(p, sides[1].layers[p.layer]): p for p in theirs}
    # A streamed model has only one layer in memory.
    together = [[layer] for layer in sorted(layers)] if reading.decoder.stream else [layers]
    found = []
    for some in together:
        with ExitStack() as stack:
            for side, layer in itertools.product(sides, some):
                stack.enter_context(side.held(layer))
            written = {}
            for p in ours:
                if p.layer not in some or (same := given.get(_place(p, p.layer))) is None:
                    continue
                W, W2 = p.weight(decoders[0].model), same.weight(decoders[1].model)
                if W2.shape == W.shape and not torch.equal(W2.to(W.device), W):
                    written[p] = W2.to(W.device)
            if written:
                found.append(measure_matrix_errors(reading, written, batch_size))
    return joined(found) if found else None


def _place(p: Projection, layer: int) -> tuple[int, str, int | None, int | None]:
    """What identifies a matrix in both models; `layer` is the dense model's number of its layer."""
    return layer, p.component, p.head, p.expert


_Seen = tuple[float, torch.Tensor, torch.Tensor, torch.Tensor]


def _explain_windows(
    sides: tuple[Side, Side],
    scorers: Sequence[Scorer],
    ids: torch.Tensor,
    sums: ErrorSums,
    blame: Blame,
) -> list[_Seen]:
    """Add these windows to all sums; of each of them by how much its loss rises, and what `TokenSums` adds."""
    first, second = sides
    (h, final), (changed, changed_final) = (side.states(ids) for side in sides)
    h2 = [state.to(h[0].device) for state in changed]
    sums.add_states(h, h2)
    # By part: the state with this part alone compressed, and the state with all parts but this compressed.
    runs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    if not torch.equal(h[0], h2[0]):
        runs[0] = h2[0].clone(), h[0].clone()
    for k in range(first.total):
        with first.held(k), second.held(k):
            for side, states in zip(sides, zip(*runs.values(), strict=True), strict=False):  # none at first
                side.run_each(k, ids, states)
            g, g2 = (second.run(k, ids, state) for state in (h[k], h2[k]))
            sums.add_layer(k, difference((h2[k], h2[k + 1]), (h[k], h[k + 1])), h[k + 1], (g, g2))
            if not torch.equal(g.to(h[0].device), h[k + 1]):
                f = first.run(k, ids, h2[k])
                # The states that entered the layer are not needed any more; their memory is reused.
                runs[k + 1] = h[k].copy_(g), h2[k].copy_(f)
    # The last part, final norm and head: they belong to the other model than the layers before them.
    by_dense_norm = first.finish_each(ids, h2[-1:])[0].to(changed_final)
    if scorers[0] is not scorers[1] or not torch.equal(by_dense_norm, changed_final):
        runs[first.total + 1] = h2[-1], h[-1]
    seen: list[_Seen] = []
    for number, window in enumerate(ids.split(1)):
        part = slice(number, number + 1)
        columns = zip(*([state[part] for state in pair] for pair in runs.values()), strict=True)
        finals = [side.finish_each(window, states) for side, states in zip(sides, columns, strict=False)]  # or none
        read_by = [[*zip(scorers, map(predicting, pair), strict=True)] for pair in zip(*finals, strict=True)]
        if first.total + 1 in runs:
            read_by[-1].reverse()
        whole = zip(scorers, (final[part], changed_final[part]), strict=True)
        dense, *others = [(scorer, predicting(state)) for scorer, state in whole]
        found, turned = predictions(dense, [*others, *itertools.chain.from_iterable(read_by)], window[0, 1:])
        blame.add(found, list(runs))
        seen.append((float((found[1, 1] - found[0, 1]).mean()), turned, found[1, 0], window.cpu()))
    return seen


def _rounding(side: Side, ids: torch.Tensor) -> float:
    """How far two forwards of one layer may differ by rounding, relative to the state that leaves it."""
    model = side.reading.model
    unit = torch.finfo(roughness(side.reading.structure, ids, model.dtype).coarsest).eps
    return _UNITS * max(unit, UNSEEN_ROUNDING if side.reading.decoder.packed else 0.0)


def _other_settings(dense: ModelIdentity, compressed: ModelIdentity) -> str:
    """A phrase about settings that differ between two models with as many layers; empty if there are none."""
    other = compressed.other_settings(dense) if dense.num_layers == compressed.num_layers else ""
    common = dense.weights.keys() & compressed.weights.keys()
    same = dense.architecture == compressed.architecture and any(
        dense.weights[dtype] == compressed.weights[dtype] for dtype in common
    )
    return other and f"{'the weights are the same, and ' if same else ''}the settings differ{other}"


_POSITIONS, _CHANGES = 32, 8  # positions and changed models whose predictions are timed
# The most times that the files of a streamed model are read, including the checks and timing beforehand.
READINGS = 18


def forwards(layers: int) -> int:
    """The most forwards that `explain` takes of each window: all layers and the embedding differ."""
    return layers + 7


@in_eval_mode
def told_cost(reading: Reading) -> str:
    """At most how many forwards, and about how many minutes, `explain` takes on this batch of the dense model.

    Raises NonFiniteError naming the layer if a state of its first window is not finite.
    """
    layers, streamed = reading.structure.num_layers, reading.decoder.stream is not None
    ids = reading.windows(1)[0]
    Side(reading, tuple(range(layers)), layers).require_finite(ids)
    scorer = reading.scorer
    repeats = 1 if streamed else 3
    state, forward = _timed(lambda: predicting(final_state(reading.structure, ids)), repeats)
    some = state[:_POSITIONS]
    changed = [(scorer, some.roll(1, 0))] * _CHANGES
    _, compared = _timed(lambda: predictions((scorer, some), changed, ids[0, 1 : 1 + len(some)])[0], 3)
    # The time to read the files of a streamed model: that of a forward of one token.
    read = _timed(lambda: final_state(reading.structure, ids[:1, :1]), 1)[1] if streamed else 0.0
    head = compared * len(state) / len(some) / _CHANGES
    times = 2 * (layers + 2)
    passes = forwards(layers) * max(0.0, forward - read) + times * head
    minutes = (len(reading.windows(1)) * passes + 2 * READINGS * read) / 60
    files = f"; the files of each are read up to {READINGS} times" if streamed else ""
    return (
        f"About {max(1, round(minutes))} min: at most {forwards(layers)} forwards of {reading.batch.tokens:,} tokens, "
        f"fewer where layers are equal{files}"
    )


def _timed(run: Callable[[], torch.Tensor], repeats: int) -> tuple[torch.Tensor, float]:
    """What `run` returns, and its seconds: the least of `repeats`, because the first run warms up."""
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        found = run()
        seconds.append(perf_counter() - start)
    return found, min(seconds)
