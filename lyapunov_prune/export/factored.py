"""Write a compressed model whose low-rank matrices are stored as two factors, in the compact format; and its gate.

How far logits move when every weight is rounded once more depends on the model. In a half-precision model that a low
rank has wrecked, rounding can move them more than a wrong index would. So the gate checks each matrix against the bound
of its rounding, and compares the logits with those of the dense model whose modules use, by hooks, the product of the
factors.

1. The product of the factors is the dense matrix within rounding (`factors.rounding_of`).
2. The logits are those of the dense model whose modules answer with `L_i (R_i x) + b_i`.
3. So are those of decoding through the cache.
4. Saved and reloaded it is the same model, to the last bit of every tensor.
5. Parameters and bytes on disk fell by exactly what the factors save.
6. In a process without this package its logits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.arguments import checked
from lyapunov_prune.checkpoints.beside import save_files
from lyapunov_prune.checkpoints.cards import write_card
from lyapunov_prune.checkpoints.reloading import ELSEWHERE, RELOADED, GateCheck, elsewhere_check
from lyapunov_prune.checkpoints.saving import size_of
from lyapunov_prune.compression.compress import Compressed
from lyapunov_prune.compression.recipe import Asked
from lyapunov_prune.compression.report import REPORT, CompressionReport, Packed
from lyapunov_prune.export.compact_gate import GATE
from lyapunov_prune.export.factors import (
    Factored,
    Factors,
    factors_of,
    find_factored,
    rounding_of,
    with_factors,
    with_places,
)
from lyapunov_prune.export.table import FORMATS
from lyapunov_prune.forward.logits import cached_logits, deviation, sample_inputs
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Decoder, Model, wrap
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import find_structure, in_eval_mode
from lyapunov_prune.pruning.counting import COUNTED, fallen_check, sizes_in_memory
from lyapunov_prune.pruning.gate import CACHED, Check, Gate, GateReport, OnFiles, attempt, bytes_in
from lyapunov_prune.pruning.provenance import gate_table
from lyapunov_prune.results.files import require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_of
from lyapunov_prune.results.result import Result

FORMAT = "compact"
FACTORS, PRODUCTS = "factors within rounding", "same as products by hooks"
NOT_STREAMED = (PRODUCTS, CACHED)


@checked
@in_eval_mode
def write_factored(
    done: Compressed,
    tokenizer: PreTrainedTokenizerBase,
    target: str | Path,
    title: str,
    results: Mapping[str, Result] | None = None,
) -> CompressionReport:
    """Write `done`, a low-rank result of `compress`, with two factors for each matrix that they make smaller.

    Returns its report with the size added. The folder is what `write_model` writes, with `gate.json` and the module
    that transformers needs to load it without this package.

    Raises CheckFailed when the gate fails and LyapunovPruneError for another method, a family that the compact format
    does not know, when no matrix is smaller, when the target is not empty or the disk refuses; either way nothing is
    left there.
    """
    FORMATS.make(FORMAT).require_method(Asked(done.report.method))
    require_empty(target)
    dense, ranks = done.model, done.report.ranks
    small, factored = with_factors(dense, ranks), find_factored(dense, ranks)
    with whole_folder(target) as folder:
        save_files(small, tokenizer, folder)
        gate = verify_factored(dense, small, factored, folder)
        _keep(gate, folder)
        report = replace(done.report, packed=_stored_in(folder, dense, factored))
        history_of(dense).save(folder / HISTORY)
        for name, result in {**(results or {}), REPORT: report}.items():
            result.save(folder / name)
        write_card(folder, title, report.about(), small, {"Gate": gate_table(gate)})
    return report


class Factoring:
    """The stored tensors of a streamed model with factored matrices; a layer's factors are made while it is in memory.

    `small` is the model that the files describe. Its layers are on the `meta` device, and it is never run.
    """

    def __init__(self, decoder: Decoder, ranks: Mapping[str, int | None]) -> None:
        self._decoder, self._factored = decoder, find_factored(decoder, ranks)
        self._errors: list[tuple[float, str]] = []
        small = with_places(decoder, self._factored)
        self.small = Decoder(small, find_structure(small))

    def state(self, model: PreTrainedModel, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of `model` in memory, by their names in `small`; of the layers, `layer` alone is in memory."""
        state = model.state_dict()
        for each in (each for each in self._factored if each.runs[0].layer == layer):
            tensors = factors_of(model, each)
            self._errors.extend(_beyond_rounding(model, each, _pairs(tensors, each)))
            state |= {f"{each.module}.{name}": tensor for name, tensor in tensors.items()}
        return state

    def finish(self, folder: Path, reloaded: GateCheck) -> tuple[GateReport, Packed]:
        """Run the gate on `folder`, which holds all layers: checks 1, 4 (`reloaded`), 5, and 6 without its logits.

        Raises CheckFailed when a check fails.
        """
        checks = (
            _within_rounding(self._errors),
            reloaded,
            attempt(COUNTED, lambda: _counted(self._decoder, self.small, self._factored, folder)),
            attempt(ELSEWHERE, lambda: elsewhere_check(self.small.model, folder, [])),
        )
        _keep(gate := GateReport(checks), folder)
        return gate, _stored_in(folder, self._decoder.model, self._factored)


def _keep(gate: GateReport, folder: Path) -> None:
    gate.require_passed("the model of two factors", "write it plain")
    gate.save(folder / GATE)


def _stored_in(folder: Path, dense: PreTrainedModel, factored: Sequence[Factored]) -> Packed:
    return Packed(FORMAT, bytes_in(folder), size_of(dense), sum(len(each.runs) for each in factored))


@in_eval_mode
def verify_factored(
    dense: Model,
    small: Model,
    factored: Sequence[Factored],
    folder: Path,
    *,
    elsewhere: bool = True,
) -> GateReport:
    """Put `small`, made from `dense` by `with_factors` and saved in `folder`, through the checks, on random tokens.

    `factored` is `find_factored` of `dense`. The process without this package takes some seconds to start;
    `elsewhere=False` skips it.
    """
    reference, result = wrap(dense), wrap(small)
    standing_in = partial(answered_by_factors, small=result.model, factored=factored)
    gate = Gate(reference, result, sample_inputs(reference, None), standing_in)
    detail = "logits against the dense model given products by hooks"
    checks: dict[str, Check] = {
        FACTORS: lambda: _within_rounding(
            error for each in factored for error in _beyond_rounding(reference.model, each, _stored(result.model, each))
        ),
        PRODUCTS: lambda: gate.same(detail, name=PRODUCTS),
        CACHED: lambda: _decoded(gate),
    }
    on_files: dict[str, OnFiles] = {
        RELOADED: lambda folder: gate.reloads(folder, lambda loaded: _changed(result.model, loaded)),
        COUNTED: lambda folder: _counted(reference, result, factored, folder),
    }
    if elsewhere:
        on_files[ELSEWHERE] = lambda folder: elsewhere_check(result.model, folder, gate.inputs)
    return gate.report(checks, on_files, folder)


def _stored(small: PreTrainedModel, each: Factored) -> list[Factors]:
    """`(L, R)` for every run of rows, as stored in `small`."""
    return _pairs(small.get_submodule(each.module).state_dict(), each)


def _pairs(tensors: Mapping[str, torch.Tensor], each: Factored) -> list[Factors]:
    rights = tensors["right.weight"].split(each.ranks)
    return [(tensors[f"left.{i}.weight"], R) for i, R in enumerate(rights)]


def _beyond_rounding(dense: PreTrainedModel, each: Factored, pairs: Sequence[Factors]) -> Iterator[tuple[float, str]]:
    """For every run of rows, the name of its matrix and `‖L R − W‖_F` divided by the bound of rounding."""
    for p, factors in zip(each.runs, pairs, strict=True):
        W, (L, R) = p.weight(dense), factors
        error = float((lift(L) @ lift(R) - lift(W)).norm())
        yield error / limit if (limit := rounding_of(W, factors)) else float(error > 0), p.name


def _within_rounding(errors: Iterable[tuple[float, str]]) -> GateCheck:
    worst, name = 0.0, ""
    for beyond, matrix in errors:
        if not beyond <= worst:
            worst, name = beyond, matrix
    return GateCheck(FACTORS, worst <= 1, worst, 1.0, f"error of a product over what rounding allows, most in {name}")


@contextmanager
def answered_by_factors(decoder: Decoder, small: PreTrainedModel, factored: Sequence[Factored]) -> Iterator[None]:
    """Within the block, the `factored` modules of `decoder` return `L_i (R_i x) + b_i` with the factors of `small`."""
    dense = decoder.model

    def answer(each: Factored) -> Callable[..., torch.Tensor]:
        right: Any = small.get_submodule(each.module).right.weight  # type: ignore[union-attr]
        pairs, biases = _stored(small, each), [p.bias(dense) for p in each.runs]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> torch.Tensor:
            middle = linear(args[0], right).split(each.ranks, dim=-1)
            runs = zip(middle, pairs, biases, strict=True)
            return torch.cat([linear(x, L, b) for x, (L, _), b in runs], dim=-1)

        return hook

    with hooked(after=[(dense.get_submodule(each.module), answer(each)) for each in factored]):
        yield


def _decoded(gate: Gate) -> GateCheck:
    """Cached decoding of both: a model that a low rank has wrecked may drift from its own forward by rounding."""
    worst = 0.0
    for ids in gate.inputs:
        with gate.standing_in(gate.reference):
            reference = cached_logits(gate.reference.model, ids)
        steps = cached_logits(gate.result.model, ids)
        if reference is None or steps is None:
            return GateCheck(CACHED, False, float("inf"), gate.limit, "the cache is gone")
        worst = max(worst, deviation(steps, reference))
    return GateCheck(CACHED, worst <= gate.limit, worst, gate.limit, "cached decoding of both")


def _changed(small: PreTrainedModel, loaded: PreTrainedModel) -> str:
    """The first tensor that is not, to the last bit, what it was; empty if there is none."""
    again = loaded.state_dict()
    wrong = (name for name, tensor in small.state_dict().items() if not torch.equal(tensor, again[name]))
    return next((f"{name} came back with other numbers" for name in wrong), "")


def _counted(dense: Decoder, small: Decoder, factored: Sequence[Factored], folder: Path) -> GateCheck:
    gone, size = sum(each.gone for each in factored), sum(size for _, size in sizes_in_memory(dense.model))
    before, left = (dense.model.num_parameters(), size), (gone, gone * dense.model.dtype.itemsize)
    return fallen_check(before, left, dense.structure.num_layers, small, bytes_in(folder))
