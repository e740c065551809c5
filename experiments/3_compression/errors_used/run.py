"""Errors known, errors used: SparseGPT and GPTQ with weighted tokens, with the correction of QEP, and with both.

    python experiments/3_compression/errors_used/run.py [--model MODEL] [--text FILE] [--setting gptq-4]...

The same calibration text for all four; the divergence and the loss are measured on other text. A file a setting
beside this one, written after every row: an interrupted run goes on, and settings may run in processes of their own.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import lyapunov_prune as lp
from experiments.common import Again, Model, Other, is_kept, run, show, texts
from experiments.divergences import divergences, finals, losses
from experiments.statements import ratio, short, table
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
# By the name of the file that holds them; the method is what stands before the dash.
SETTINGS: dict[str, dict[str, Any]] = {
    "sparsegpt-50": {"sparsity": 0.5},
    "sparsegpt-60": {"sparsity": 0.6},
    "gptq-4": {"bits": 4, "group_size": 64},
    "gptq-3": {"bits": 3, "group_size": 64},
}
PLAIN = "plain"


@dataclass(frozen=True)
class Row:
    """One variant of a method, and `KL(dense‖compressed)` and the loss of every window of unseen text, nats a token."""

    variant: str
    kl: tuple[float, ...]
    loss: tuple[float, ...]


@dataclass(frozen=True)
class ErrorsUsed(Result):
    """What the variants of a method leave of the prediction; `correction` is α where one is made."""

    setting: str  # of SETTINGS
    rows: tuple[Row, ...]
    dense: tuple[float, ...]  # loss of every window
    correction: float
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn


def variants(correction: float) -> dict[str, dict[str, Any]]:
    weighted, corrected = {"weighted": True}, {"correction": correction}
    return {PLAIN: {}, "weighted": weighted, "corrected": corrected, "both": weighted | corrected}


def main(
    model: Model = Model(),
    text: str = "builtin",
    unseen: Other = None,
    setting: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(SETTINGS)}; all if not given")] = None,
    correction: Annotated[float, typer.Option(help="the α of the correction")] = 0.5,
    calibration_tokens: int = 16384,
    tokens: int = 8192,
    context: int = 512,
    again: Again = False,
) -> None:
    folder = model.folder(HERE)
    if wanted := [name for name in setting or SETTINGS if not is_kept(folder / f"{name}.json", again)]:
        loaded = model.load()
        sizes = {"calibration": calibration_tokens, "evaluation": tokens, "context": context}
        calibration, evaluation = (read(loaded, batch) for batch in texts(loaded, text, **sizes, unseen=unseen))
        states = list(finals(evaluation, loaded.model))
        dense = losses(evaluation, states)
        on = evaluation.measured_on(), calibration.measured_on()
        for name in wanted:
            compare(ErrorsUsed(name, (), dense, correction, *on), calibration, evaluation, states, folder)
    show(written(folder))


def compare(
    found: ErrorsUsed, calibration: Reading, evaluation: Reading, states: list[torch.Tensor], folder: Path
) -> None:
    """Measure the rows of a setting that a file of an interrupted run does not hold."""
    part = folder / f"{found.setting}-part.json"
    if part.exists() and asked(before := ErrorsUsed.load(part)) == asked(found):
        found = replace(found, rows=before.rows)
    how = {"method": found.setting.split("-")[0], **SETTINGS[found.setting]}
    for name, more in variants(found.correction).items():
        if name in {row.variant for row in found.rows}:
            continue
        small = lp.compress(calibration.model, calibration, **how, **more).model
        after = list(finals(evaluation, small))  # the head is that of the dense model
        row = Row(name, divergences(evaluation, states, after), losses(evaluation, after))
        found = replace(found, rows=(*found.rows, row))
        found.save(part)
        print(found.setting, name, np.mean(row.kl), np.exp(np.mean(row.loss)), flush=True)
    found.save(folder / f"{found.setting}.json")
    part.unlink(missing_ok=True)


def asked(found: ErrorsUsed) -> tuple[object, ...]:
    return found.correction, found.measured_on, found.calibrated_on


def written(folder: Path = HERE) -> dict[str, str]:
    """KL and perplexity, and their ratios to the plain method with 95 % intervals paired by window.

    Of a setting that was not measured to its end the rows that there are.
    """
    tables: dict[str, str] = {}
    lines: dict[str, list[list[object]]] = {}
    for setting in SETTINGS:
        files = [folder / f"{setting}{end}.json" for end in ("", "-part")]
        file = next((each for each in files if each.exists()), None)
        if file is None:
            continue
        found = ErrorsUsed.load(file)
        plain = next(row for row in found.rows if row.variant == PLAIN)
        tables["setting"] = (
            f"{found.measured_on.line()}; dense perplexity {short(float(np.exp(np.mean(found.dense))))}.\n"
            f"Calibration: {found.calibrated_on.line()}; α = {found.correction:g}.\n"
        )
        for row in found.rows:
            kl, loss = np.array(row.kl), np.array(row.loss)
            beside: list[object] = [None, None]
            if row.variant != PLAIN:
                beside = [ratio(np.log(kl / np.array(plain.kl))), ratio(loss - np.array(plain.loss))]
            method, number = setting.split("-")
            amount = f"{number} bits" if method == "gptq" else f"{number}% removed"
            shown = [amount, row.variant, float(kl.mean()), beside[0], float(np.exp(loss.mean())), beside[1]]
            lines.setdefault(method, []).append(shown)
            if row.variant != PLAIN:
                tables[f"{row.variant}, {amount}"] = str(beside[0])
    head = ["amount", "variant", "KL, nats a token", "/ plain", "perplexity", "/ plain"]
    return tables | {method: table(head, rows) for method, rows in lines.items()}


if __name__ == "__main__":
    run(main)
