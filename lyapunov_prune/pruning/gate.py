"""The gate: a result is compared with a reference that hooks make compute the same, and handed out if it passes.

`Gate` holds both models and the comparisons that every gate makes: of logits, of cached decoding, of the model that is
read back from its files. `removal`, and in `export` `compact_gate` and `disk_gate`, define what the
reference computes and add further checks. Each check compares floating-point numbers on some tokens: evidence, not a
proof.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import RELOADED, GateCheck, reload_check
from lyapunov_prune.checkpoints.tensor_files import read_header
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.examples import Examples
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.errors import in_short
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import CACHE_LIMIT, SAME_LIMIT, cached_logits, deviation, last_logits
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.models.dispatched import is_dispatched
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.pictures import looks_at_images, picture_logits
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

SKIPPED, CACHED, PICTURED = "same as skipping", "cached decoding", "same with a picture"
Check = Callable[[], GateCheck]
OnFiles = Callable[[Path], GateCheck]


@dataclass(frozen=True)
class GateReport(Result):
    """The checks of the gate; `passed` if all of them did.

    `measured_on` describes the original model and all tokens that both models ran on; None if only files were compared.
    """

    checks: tuple[GateCheck, ...]
    measured_on: MeasuredOn | None = None

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def failure(self) -> str:
        """The first check that failed, in words; empty when all passed."""
        return next((f"{c.name}: {c.detail}" for c in self.checks if not c.passed), "")

    def require_passed(self, what: str = "the pruned model", remedy: str = "remove other layers") -> None:
        """Raise CheckFailed, which says that `what` was not written, with the first check that failed, if one did."""
        for check in self.checks:
            check.require_passed(f"{what} fails the removal check, {check.name}", remedy)

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            [(c.name, "passed" if c.passed else "FAILED", c.measured, c.limit, c.detail) for c in self.checks],
            columns=["check", "result", "measured", "limit", "detail"],
        )

    def headline(self) -> str:
        return "Removal check: " + ("passed" if self.passed else "FAILED")

    def answer(self) -> list[str]:
        passed = sum(check.passed for check in self.checks)
        if not self.passed:
            return [f"Removal check: FAILED. {self.failure()}"]
        return [
            f"Removal check: passed, {passed} checks. The plan was carried out; what is left computes what it should.",
            "That says nothing of how good the model is: score it beside the dense one with eval.",
        ]


@dataclass(frozen=True, eq=False)
class Gate:
    """A `reference`, a `result` made from it, and the comparisons of the two.

    Within `standing_in(reference)` the reference computes what the result should. `computed` says whether some of the
    result's weights are new, or all are copies. Both run on `inputs`: random ones, and the start of `batch`
    (`sample_inputs`).
    """

    reference: Decoder
    result: Decoder
    inputs: list[torch.Tensor]
    standing_in: Callable[[Decoder], AbstractContextManager[None]]
    computed: bool = False
    batch: Examples | None = None

    @property
    def limit(self) -> float:
        """The largest allowed deviation of the result's logits from those of the reference."""
        return (CACHE_LIMIT if self.computed else SAME_LIMIT)[self.result.model.dtype]

    def report(
        self, checks: Mapping[str, Check], on_files: Mapping[str, OnFiles], checkpoint: str | Path | None
    ) -> GateReport:
        """The report of all `checks`, then of the files: `checkpoint`, or a temporary folder with the result."""
        found = [attempt(name, check) for name, check in checks.items()]
        try:
            with saved_in(self.result.model, checkpoint) as folder:
                found += [attempt(name, partial(check, folder)) for name, check in on_files.items()]
        except Exception as error:  # a result that cannot be saved fails
            found.append(crashed(RELOADED, error))
        return GateReport(tuple(found), seen_by(self.reference, self.batch, self.inputs))

    def expected(self) -> KeptLogits:
        """The logits of the reference while it computes what the result should."""
        with self.standing_in(self.reference):
            return KeptLogits(self.reference, self.inputs)

    @cached_property
    def logits(self) -> KeptLogits:
        """The logits of the result."""
        return KeptLogits(self.result, self.inputs)

    def same(self, detail: str, expected: KeptLogits | None = None, name: str = SKIPPED) -> GateCheck:
        """Whether the logits of the result are the `expected` ones."""
        reference = self.expected() if expected is None else expected
        worst = self.logits.deviation(reference)
        return GateCheck(name, worst <= self.limit, worst, self.limit, detail)

    def pictured(self, prompt: dict[str, torch.Tensor], expected: torch.Tensor, detail: str) -> GateCheck:
        """Whether the logits of the result with an image in the prompt are the `expected` ones."""
        worst = deviation(picture_logits(self.result.model, prompt), expected)
        return GateCheck(PICTURED, worst <= self.limit, worst, self.limit, detail)

    def cached(self) -> GateCheck:
        """Whether decoding through the cache gives the logits of the uncached forward.

        The model is given the position of each step only if the reference needs it, because explicit positions can hide
        a wrong cache.
        A failure in half precision is decided again in float32 if memory allows: rounding alone may choose other
        experts.
        """
        model, inputs = self.result.model, self.inputs
        limit, detail = CACHE_LIMIT[model.dtype], "cached decoding against the uncached forward"
        worst = _cache_deviation(model, inputs)
        if worst is None:
            lost = _cache_deviation(self.reference.model, inputs[:1]) is not None
            detail = "the cache was lost" if lost else "this decoder keeps no cache: every step is an uncached forward"
            return GateCheck(CACHED, not lost, float("inf") if lost else 0.0, limit, detail)
        if not worst <= limit and (wide := _in_float32(self.result)) is not None:
            again, least = _cache_deviation(wide.model, inputs), CACHE_LIMIT[torch.float32]
            if again <= least:
                return GateCheck(CACHED, True, again, least, f"{detail}, in float32 ({worst:.2g} in {model.dtype})")
        if not worst <= limit:
            reference = self.reference.model
            intact = _cache_deviation(reference, inputs)
            if intact is not None and not intact <= limit:
                told = _cache_deviation(model, inputs, positions=True)
                worst, intact = min(worst, told), min(intact, _cache_deviation(reference, inputs, positions=True))
            detail += f" (the intact model deviates by {intact:.2g})"
        return GateCheck(CACHED, worst <= limit, worst, limit, detail)

    def in_float32(self) -> Gate | None:
        """The same comparison between float32 copies; None if the models are in float32, or the copies do not fit."""
        if (result := _in_float32(self.result)) and (reference := _in_float32(self.reference)):
            return replace(self, reference=reference, result=result)
        return None

    def reloads(self, folder: Path, changed: Callable[[PreTrainedModel], str] = lambda reloaded: "") -> GateCheck:
        """Whether the result saved in `folder` loads as the same model (`reload_check`)."""
        return reload_check(self.result, folder, self.inputs, changed, lambda: self.logits)


def seen_by(decoder: Decoder, batch: Examples | None, inputs: list[torch.Tensor]) -> MeasuredOn:
    """All `inputs` in one batch; the context is that of the longest. The classes of images are not used: all are 0."""
    model = decoder.model
    if looks_at_images(model):
        pixels, source, split = torch.cat(inputs), "random images", "all"
        if isinstance(batch, ImageBatch):
            source, split = f"{source} and the start of {batch.source}", batch.split
        return ImageBatch(pixels, torch.zeros(len(pixels), dtype=torch.int64), source, split).measured_on(decoder)
    tokens, text, split, bos = torch.cat([ids.flatten() for ids in inputs]).unsqueeze(0), "random tokens", "all", None
    if isinstance(batch, TokenBatch):
        text, split, bos = f"{text} and the start of {batch.text}", batch.split, batch.bos
    seen = TokenBatch(tokens, text, split, bos)
    return replace(seen.measured_on(decoder), context=max(ids.shape[1] for ids in inputs))


def _cache_deviation(model: PreTrainedModel, inputs: list[torch.Tensor], *, positions: bool = False) -> Any:
    """The largest deviation of cached decoding; None if the decoder has no cache."""
    worst = 0.0
    for ids in inputs:
        steps = cached_logits(model, ids, positions=positions)
        if steps is None:
            return None
        worst = max(worst, deviation(steps, last_logits(model, ids)))
    return worst


def _in_float32(decoder: Decoder) -> Decoder | None:
    """A float32 copy of a model in half precision; None for another dtype, too little memory, or several devices."""
    model = decoder.model
    needed = 6 * sum(p.numel() for p in model.parameters())  # the copy and its float32 version
    if torch.finfo(model.dtype).bits >= 32 or is_dispatched(model) or decoder.packed:
        return None
    if needed > free_memory(str(model.device)):
        return None
    wide, structure = copy.deepcopy((model, decoder.structure))
    return Decoder(wide.float(), structure)


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
    except Exception as error:  # a wrongly cut model may raise anything; that is a verdict too
        return crashed(name, error)


def crashed(name: str, error: Exception) -> GateCheck:
    """The check `name`, failed because the model raised an error."""
    return GateCheck(name, False, float("inf"), 0.0, in_short(error, 200))
