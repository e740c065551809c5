"""Errors known, errors used: SparseGPT and GPTQ with weighted tokens, with the correction of QEP, and with both.

    python experiments/3_compression/errors_used/run.py [--model MODEL] [--text FILE] [--method gptq]

The same calibration text for all four; the divergence and the loss are measured on other text. A file a method beside
this one, written after every row: an interrupted run goes on, and methods may run in processes of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Again, Device, DType, is_kept, load, of_model, texts
from experiments.statements import ratio, short, table
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.forward.states import predicting
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.projections import find_projections
from lyapunov_prune.predictions.tiles import measures
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sparsegpt": [{"sparsity": 0.5}, {"sparsity": 0.6}],
    "gptq": [{"bits": bits, "group_size": size} for bits in (4, 3) for size in (64, 128)],
}
PLAIN = "plain"


@dataclass(frozen=True)
class Row:
    """One compression, and `KL(dense‖compressed)` and the loss of every window of unseen text, nats a token."""

    setting: str
    variant: str
    kl: tuple[float, ...]
    loss: tuple[float, ...]


@dataclass(frozen=True)
class ErrorsUsed(Result):
    """What the variants of a method leave of the prediction; `correction` is α where one is made."""

    method: str
    rows: tuple[Row, ...]
    dense: tuple[float, ...]  # loss of every window
    correction: float
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn

    def headline(self) -> str:
        return f"Errors used by {self.method}\n{self.measured_on.line()}"


def variants(correction: float) -> dict[str, dict[str, Any]]:
    weighted, corrected = {"weighted": True}, {"correction": correction}
    return {PLAIN: {}, "weighted": weighted, "corrected": corrected, "both": weighted | corrected}


def named(setting: dict[str, Any]) -> str:
    if "sparsity" in setting:
        return f"{setting['sparsity']:.0%} removed"
    return f"{setting['bits']} bits, groups of {setting['group_size']}"


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    method: Annotated[list[str] | None, typer.Option(help="of sparsegpt and gptq; both if not given")] = None,
    correction: Annotated[float, typer.Option(help="the α of the correction")] = 0.5,
    calibration_tokens: int = 16384,
    tokens: int = 8192,
    context: int = 512,
    again: Again = False,
) -> None:
    folder = of_model(HERE, model)
    if wanted := [name for name in method or SETTINGS if not is_kept(folder / f"{name}.json", again)]:
        loaded = load(model, device, dtype)
        of_texts = texts(loaded, text, calibration=calibration_tokens, evaluation=tokens, context=context)
        calibration, evaluation = (read(loaded, batch) for batch in of_texts)
        states = list(finals(evaluation, loaded.model))
        dense = losses(evaluation, states)
        on = evaluation.measured_on(), calibration.measured_on()
        for name in wanted:
            compare(ErrorsUsed(name, (), dense, correction, *on), calibration, evaluation, states, folder)
    print(*written(folder).values(), sep="\n")


def compare(
    found: ErrorsUsed, calibration: Reading, evaluation: Reading, states: list[torch.Tensor], folder: Path
) -> None:
    """Measure the rows of a method that a file of an interrupted run does not hold."""
    part = folder / f"{found.method}-part.json"
    if part.exists() and asked(before := ErrorsUsed.load(part)) == asked(found):
        found = replace(found, rows=before.rows)
    inputs = [p.weight(calibration.model).shape[1] for p in find_projections(calibration.decoder)]
    for setting in SETTINGS[found.method]:
        if any(n % setting.get("group_size", 1) for n in inputs):  # groups that do not fit
            continue
        for variant, how in variants(found.correction).items():
            if (named(setting), variant) in {(row.setting, row.variant) for row in found.rows}:
                continue
            small = lp.compress(calibration.model, calibration, method=found.method, **setting, **how).model
            after = list(finals(evaluation, small))  # the head is that of the dense model
            kl, loss = divergences(evaluation, states, after), losses(evaluation, after)
            row = Row(named(setting), variant, kl, loss)
            found = replace(found, rows=(*found.rows, row))
            found.save(part)
            print(found.method, row.setting, variant, np.mean(row.kl), np.exp(np.mean(row.loss)), flush=True)
    found.save(folder / f"{found.method}.json")
    part.unlink(missing_ok=True)


def asked(found: ErrorsUsed) -> tuple[object, ...]:
    return found.correction, found.measured_on, found.calibrated_on


@torch.no_grad()
def finals(reading: Reading, model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """The final state of every window by `model`, tokens × width."""
    other = read(wrap(model), reading.batch)
    for ids in reading.windows(1):
        yield final_state(other.structure, ids)[0]


@torch.no_grad()
def losses(reading: Reading, states: Sequence[torch.Tensor]) -> tuple[float, ...]:
    pairs = zip(states, reading.windows(1), strict=True)
    return tuple(reading.scorer.loss(state, ids[0]) for state, ids in pairs)


@torch.no_grad()
def divergences(reading: Reading, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """`KL(dense‖compressed)` of every window, the mean over its positions but the last."""
    pairs = ([predicting(state[None]) for state in pair] for pair in zip(before, after, strict=True))
    return tuple(float(measures(reading.scorer, p, [q], 1.0)[0, 1].mean()) for p, q in pairs)


def written(folder: Path = HERE) -> dict[str, str]:
    """KL and perplexity, and their ratios to the plain method with 95 % intervals paired by window."""
    tables: dict[str, str] = {}
    head = ["amount", "variant", "KL, nats a token", "/ plain", "perplexity", "/ plain"]
    for method in SETTINGS:
        if not (folder / f"{method}.json").exists():
            continue
        found = ErrorsUsed.load(folder / f"{method}.json")
        plain = {row.setting: row for row in found.rows if row.variant == PLAIN}
        lines: list[list[object]] = []
        for row in found.rows:
            kl, loss = np.array(row.kl), np.array(row.loss)
            beside: list[object] = [None, None]
            if row.variant != PLAIN:
                of = plain[row.setting]
                beside = [ratio(np.log(kl / np.array(of.kl))), ratio(loss - np.array(of.loss))]
            lines.append([row.setting, row.variant, float(kl.mean()), beside[0], float(np.exp(loss.mean())), beside[1]])
        tables[method] = table(head, lines)
        tables["setting"] = (
            f"{found.measured_on.line()}; dense perplexity {short(float(np.exp(np.mean(found.dense))))}.\n"
            f"Calibration: {found.calibrated_on.line()}; α = {found.correction:g}.\n"
        )
    return tables


if __name__ == "__main__":
    typer.run(main)
