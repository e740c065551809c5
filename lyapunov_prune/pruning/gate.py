"""The removal gate: a pruned model is right when four independent checks say so.

1. Its logits are those of the original with the same layers and sublayers passed over, hidden vectors replaced and
   gaps mended, by hooks.
2. Decoding step by step with a cache gives the logits of the uncached forward.
3. Saved and reloaded with plain transformers it is the same model: same keys, same logits, same settings
   in every layer.
4. Layers, parameters and bytes on disk fell by exactly what was removed.

Each check compares floating-point numbers on some tokens: evidence, not a proof.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lyapunov_prune.arguments import checked
from lyapunov_prune.checkpoints.outline import layer_of
from lyapunov_prune.checkpoints.reloading import RELOADED, GateCheck, reload_check
from lyapunov_prune.checkpoints.tensor_files import read_header
from lyapunov_prune.data.batch import TokenBatch, Tokens, as_batch
from lyapunov_prune.data.examples import Examples
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.errors import in_short
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import CACHE_LIMIT, cached_logits, deviation, last_logits, sample_inputs
from lyapunov_prune.forward.sublayers import silenced
from lyapunov_prune.mending.mend import Mend, mapped, products
from lyapunov_prune.merging.merge import Merged
from lyapunov_prune.merging.replaced import hidden_replaced
from lyapunov_prune.models.classifiers import looks_at_images
from lyapunov_prune.models.decoder import wrap_any
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.models.dispatched import is_dispatched
from lyapunov_prune.models.families import family_entry
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.pictures import picture_logits, picture_prompt, reads_pictures
from lyapunov_prune.models.quantised import is_packed
from lyapunov_prune.models.structure import find_structure, in_eval_mode
from lyapunov_prune.models.wrappers import is_wrapped
from lyapunov_prune.pruning.counting import COUNTED, count_check, shares_leaving, sizes_in_memory
from lyapunov_prune.pruning.merge_gate import MERGED, logits_limit, merged_blocks, merged_check
from lyapunov_prune.pruning.mirroring import mirrored
from lyapunov_prune.pruning.plan import PruningPlan, as_plan
from lyapunov_prune.pruning.surgery import require_merged
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

SKIPPED, CACHED, PICTURED = "same as skipping", "cached decoding", "same with a picture"
_BESIDE = "logits with a picture in the prompt, and all weights outside the layers"


@dataclass(frozen=True)
class GateReport(Result):
    """The checks of the gate; `passed` when all did.

    `measured_on` is of the original model and all tokens that both ran on; None where only files were compared, and in
    reports of older versions.
    """

    checks: tuple[GateCheck, ...]
    measured_on: MeasuredOn | None = None

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def failure(self) -> str:
        """The first check that failed, in words; empty when all passed."""
        return next((f"{c.name}: {c.detail}" for c in self.checks if not c.passed), "")

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            [(c.name, "passed" if c.passed else "FAILED", c.measured, c.limit, c.detail) for c in self.checks],
            columns=["check", "result", "measured", "limit", "detail"],
        )

    def headline(self) -> str:
        return "Removal gate: " + ("passed" if self.passed else "FAILED")

    def answer(self) -> list[str]:
        passed = sum(check.passed for check in self.checks)
        if not self.passed:
            return [f"Removal gate: FAILED. {self.failure()}"]
        return [
            f"Removal gate: passed, {passed} checks. The layers are gone and what is left computes what it should.",
            "That says nothing of how good the model is: score it beside the dense one with eval.",
        ]


@checked
@in_eval_mode
@torch.no_grad()
def verify_removal(
    original: PreTrainedModel,
    pruned: PreTrainedModel,
    plan: PruningPlan | Sequence[int],
    batch: Tokens | None = None,
    *,
    checkpoint: str | Path | None = None,
    merged: Sequence[Merged] = (),
    mends: Sequence[Mend] = (),
) -> GateReport:
    """Put `pruned` through the four checks on random tokens and on the start of `batch`.

    `merged` are the blocks that lost their activation, by the plan's reduction (`merging.merge_layers`); a fifth check
    holds the matrices in `pruned` against them (`merge_gate`). `mends` are the maps that it was mended by: they are put
    on the original by hooks, and its parameters that took them are held against the products in the same way.

    `checkpoint` is a folder where `pruned` has been saved; without it the model is saved to a temporary
    folder. Long enough inputs are used to roll over sliding windows of up to 1,024 tokens. Raises
    LyapunovPruneError for a plan made for another model.
    """
    plan = as_plan(original, plan)
    require_merged(plan, merged)
    inputs = sample_inputs(wrap_any(original), batch)
    checks = [
        attempt(SKIPPED, lambda: _skipped_check(original, pruned, plan, inputs, merged, mends)),
        attempt(CACHED, lambda: cache_check(original, pruned, inputs)),
    ]
    if is_wrapped(original) or reads_pictures(original):
        checks.append(attempt(PICTURED, lambda: _picture_check(original, pruned, plan, merged, mends)))
    if merged or mends:
        checks.append(attempt(MERGED, lambda: _merged_check(original, pruned, plan, merged, mends)))
    try:
        with saved_in(pruned, checkpoint) as folder:
            checks.append(attempt(RELOADED, lambda: reload_check(pruned, folder, inputs)))
            checks.append(attempt(COUNTED, lambda: _counted(original, pruned, plan, folder)))
    except Exception as error:  # it cannot even be saved
        checks.append(crashed(RELOADED, error))
    return GateReport(tuple(checks), seen_by(original, batch, inputs))


def seen_by(model: PreTrainedModel, batch: Examples | Tokens | None, inputs: list[torch.Tensor]) -> MeasuredOn:
    """All `inputs` in a row; the context is that of the longest. Classes of images are not looked at: all are 0."""
    if looks_at_images(model):
        pixels, source, split = torch.cat(inputs), "random images", "all"
        if isinstance(batch, ImageBatch):
            source, split = f"{source} and the start of {batch.source}", batch.split
        return ImageBatch(pixels, torch.zeros(len(pixels), dtype=torch.int64), source, split).measured_on(model)
    tokens, text, split, bos = torch.cat([ids.flatten() for ids in inputs]).unsqueeze(0), "random tokens", "all", None
    if batch is not None and not isinstance(batch, ImageBatch):  # `sample_inputs` has refused images for a decoder
        given = as_batch(model, batch)
        text, split, bos = f"{text} and the start of {given.text}", given.split, given.bos
    seen = TokenBatch(tokens, text, split, bos)
    return replace(seen.measured_on(model), context=max(ids.shape[1] for ids in inputs))


def _skipped_check(
    original: PreTrainedModel,
    pruned: PreTrainedModel,
    plan: PruningPlan,
    inputs: list[torch.Tensor],
    merged: Sequence[Merged],
    mends: Sequence[Mend],
) -> GateCheck:
    """In half precision, what maps fail by is decided in float32: there the rounding of the stored matrices is left."""
    with _as_planned(original, plan, merged, mends):
        reference = KeptLogits(wrap_any(original), inputs)
    limit, detail = _limit(original, pruned, plan, merged, mends), "logits against the original with the layers skipped"
    found = same_check(pruned, inputs, reference, limit, detail)
    if not found.passed and mends and (wide := _in_float32(pruned)) and (whole := _in_float32(original)):
        del reference
        with _as_planned(whole, plan, merged, mends):
            reference = KeptLogits(wrap_any(whole), inputs)
        detail += f", in float32 ({found.measured:.2g} in {pruned.dtype})"
        found = same_check(wide, inputs, reference, limit, detail)
    return found


@contextmanager
def _as_planned(
    original: PreTrainedModel, plan: PruningPlan, merged: Sequence[Merged], mends: Sequence[Mend]
) -> Iterator[None]:
    """Inside the block `original` computes, by hooks, what `plan`, `merged` and `mends` make of it."""
    layers = find_structure(original).layers
    silent = silenced(wrap_any(original), plan.drop_attention, plan.drop_mlp)
    replaced = hidden_replaced(layers, [(each.block, each.tau) for each in merged])
    with silent, replaced, mapped(layers, mends), skipped(find_structure(original), plan.remove):
        yield


def _limit(
    original: PreTrainedModel,
    pruned: PreTrainedModel,
    plan: PruningPlan,
    merged: Sequence[Merged],
    mends: Sequence[Mend],
) -> float:
    structure = find_structure(original)
    computed = family_entry(structure.model_type).changes(structure.config) and bool(plan.remove)
    return logits_limit(pruned, bool(merged or mends) or computed)


def _picture_check(
    original: PreTrainedModel,
    pruned: PreTrainedModel,
    plan: PruningPlan,
    merged: Sequence[Merged],
    mends: Sequence[Mend],
) -> GateCheck:
    """Whether what lies outside the layers is unchanged, and the logits are the same with a picture in the prompt."""
    limit = _limit(original, pruned, plan, merged, mends)
    structure, after = find_structure(original), pruned.state_dict()
    stays = {name for name, share in shares_leaving(original, plan).items() if not share}
    for name, tensor in original.state_dict().items():
        if layer_of(name, structure) is None and name in stays and not torch.equal(after[name], tensor):
            return GateCheck(PICTURED, False, float("inf"), limit, f"{name} lies outside the layers and changed")
    prompt = picture_prompt(original)
    if prompt is None:
        return GateCheck(PICTURED, True, 0.0, limit, "all weights outside the layers; no picture fits into a prompt")
    with _as_planned(original, plan, merged, mends):
        reference = picture_logits(original, prompt)
    worst = deviation(picture_logits(pruned, prompt), reference)
    return GateCheck(PICTURED, worst <= limit, worst, limit, _BESIDE)


def _merged_check(
    original: PreTrainedModel,
    pruned: PreTrainedModel,
    plan: PruningPlan,
    merged: Sequence[Merged],
    mends: Sequence[Mend],
) -> GateCheck:
    layers, made = (find_structure(model).layers for model in (original, pruned))
    blocks = {each.block.layer: (each.block, each.tau) for each in merged}
    rows = list(merged_blocks(layers, blocks, lambda i: mirrored(made[plan.kept.index(i)], blocks[i][0])))
    for mend in mends:
        i = mend.place.layer
        rows += [(i, *product) for product in products(layers[i], made[plan.kept.index(i)], mend)]
    return merged_check(rows, "a merged block" if merged else "a mended matrix")


def same_check(
    pruned: PreTrainedModel, inputs: list[torch.Tensor], reference: KeptLogits, limit: float, detail: str
) -> GateCheck:
    """Whether the logits of `pruned` are those of the `reference`."""
    worst = KeptLogits(wrap_any(pruned), inputs).deviation(reference)
    return GateCheck(SKIPPED, worst <= limit, worst, limit, detail)


def cache_check(original: PreTrainedModel, pruned: PreTrainedModel, inputs: list[torch.Tensor]) -> GateCheck:
    """Whether decoding through the cache gives the logits of the uncached forward.

    Told the position of each step only where the original has to be: a cache that is wrong may hide behind it. What
    half precision fails is decided in float32, where there is room for it: rounding alone may choose other experts.
    """
    limit, detail = CACHE_LIMIT[pruned.dtype], "cached decoding against the uncached forward"
    worst = _cache_deviation(pruned, inputs)
    if worst is None:
        lost = _cache_deviation(original, inputs[:1]) is not None
        detail = "the cache is gone" if lost else "this decoder keeps no cache: every step is an uncached forward"
        return GateCheck(CACHED, not lost, float("inf") if lost else 0.0, limit, detail)
    if not worst <= limit and (wide := _in_float32(pruned)) is not None:
        again, least = _cache_deviation(wide, inputs), CACHE_LIMIT[torch.float32]
        if again <= least:
            return GateCheck(CACHED, True, again, least, f"{detail}, in float32 ({worst:.2g} in {pruned.dtype})")
    if not worst <= limit:
        intact = _cache_deviation(original, inputs)
        if intact is not None and not intact <= limit:
            told = _cache_deviation(pruned, inputs, positions=True)
            worst, intact = min(worst, told), min(intact, _cache_deviation(original, inputs, positions=True))
        detail += f" (the intact model deviates by {intact:.2g})"
    return GateCheck(CACHED, worst <= limit, worst, limit, detail)


def _cache_deviation(model: PreTrainedModel, inputs: list[torch.Tensor], *, positions: bool = False) -> Any:
    """The largest deviation of cached decoding; None for a decoder without a cache."""
    worst = 0.0
    for ids in inputs:
        steps = cached_logits(model, ids, positions=positions)
        if steps is None:
            return None
        worst = max(worst, deviation(steps, last_logits(model, ids)))
    return worst


def _in_float32(model: PreTrainedModel) -> PreTrainedModel | None:
    """A copy of a model in half precision; None of others, and where it has no room or lies on several devices."""
    needed = 6 * sum(p.numel() for p in model.parameters())  # the copy, and its float32
    if torch.finfo(model.dtype).bits >= 32 or is_dispatched(model) or is_packed(model):
        return None
    return copy.deepcopy(model).float() if needed <= free_memory(str(model.device)) else None


def _counted(original: PreTrainedModel, pruned: PreTrainedModel, plan: PruningPlan, folder: Path) -> GateCheck:
    return count_check(original, sizes_in_memory(original), pruned, bytes_in(folder), plan)


def bytes_in(folder: Path) -> int:
    """The bytes of all tensors in the files of `folder`."""
    return sum(tensor.size for file in folder.glob("*.safetensors") for tensor in read_header(file).values())


@contextmanager
def saved_in(model: PreTrainedModel, checkpoint: str | Path | None) -> Iterator[Path]:
    if checkpoint is not None:
        yield Path(checkpoint)
        return
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-gate-") as folder, quiet():
        model.save_pretrained(folder)
        yield Path(folder)


def attempt(name: str, check: Callable[[], GateCheck]) -> GateCheck:
    try:
        return check()
    except Exception as error:  # a wrongly cut model fails in its own ways; that is a verdict too
        return crashed(name, error)


def crashed(name: str, error: Exception) -> GateCheck:
    """The check `name` failed by an error of the model's own."""
    return GateCheck(name, False, float("inf"), 0.0, in_short(error, 200))
