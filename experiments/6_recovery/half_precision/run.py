"""Distillation with matrix products in bfloat16 beside float32: processor time a step, and what the steps reach.

    python experiments/6_recovery/half_precision/run.py --model MODEL --removed 12,13 --text A.txt --unseen B.txt

All parameters of the layers are trained from the same weights, over the same windows in the same order, at the rate
that `heal` tries first. Weights, gradients and optimizer are float32; in bfloat16 the forwards of both models run under
torch's autocast. `compare` holds the losses of the windows of --unseen against each other.
"""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, Unseen, plain, read_text, run
from experiments.statements import table
from lyapunov_prune.evaluation.judging import compare
from lyapunov_prune.forward.reading import read
from lyapunov_prune.healing.distillation import Distillation, update_sizes
from lyapunov_prune.healing.heal import RATE
from lyapunov_prune.healing.rounds import schedule
from lyapunov_prune.healing.trained import drawn_order, trained
from lyapunov_prune.mending.judge import losses as window_losses
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
FIELDS = ("text", "split", "text_hash", "tokens", "context")  # what the result says of a text


def main(
    unseen: Unseen,
    removed: Annotated[str, typer.Option(help="layers, with commas")],
    model: Model = Model(dtype="float32"),
    text: str = "builtin",
    steps: int = 100,
    windows: int = 32,
) -> None:
    loaded = model.load()
    dense, gone = loaded.model, [int(layer) for layer in removed.split(",")]
    lesson = read_text(loaded, text, 256 * windows, 256, "calibration" if text == "builtin" else "all")
    scored = read_text(loaded, unseen, 4096, 256, "all")
    cut = lp.remove_layers(dense, gone)
    start, rows, losses = nll(cut, scored), [], {}
    for narrow in (False, True):
        student, seconds = copy.deepcopy(cut), []
        with trained(student, None, 0) as parameters:
            sizes = update_sizes(student, parameters)
            taught = Distillation(student, dense, parameters, 1.0, sizes=sizes, narrow=narrow)
            for step, window in enumerate(drawn_order(len(lesson), steps, 0)):
                began = time.process_time()
                taught.take_step(lesson.ids[window][None], RATE * schedule(step, steps))
                seconds.append(time.process_time() - began)
        losses[narrow] = nll(student, scored)
        first, again = median(seconds[:windows]), median(seconds[windows:])
        rows.append({"narrow": narrow, "first": first, "again": again, "loss": float(losses[narrow].mean())})
        print(rows[-1], flush=True)
    about = {"model": plain(model.name), "removed": gone, "steps": steps, "cut": float(start.mean()), "rows": rows}
    batches = {"measured_on": scored, "learnt_on": lesson}
    about |= {name: {field: getattr(batch, field) for field in FIELDS} for name, batch in batches.items()}
    about |= {"comparison": encode(compare(losses[False], losses[True]))}
    write_whole(HERE / f"{plain(model.name)}.json", json.dumps(about, indent=1) + "\n")


@torch.no_grad()
def nll(model: PreTrainedModel, scored: lp.TokenBatch) -> np.ndarray:
    """The mean loss of each window."""
    return window_losses(read(lp.wrap(model), scored), ())


def written() -> dict[str, str]:
    cells: list[list[object]] = []
    for path in sorted(HERE.glob("*.json")):
        of = json.loads(path.read_text(encoding="utf-8"))
        cells.append([of["model"], "not trained", None, None, of["cut"], None])
        for row in of["rows"]:
            change = "{change:+.4f} ({low:+.4f} to {high:+.4f})".format(**of["comparison"]) if row["narrow"] else None
            dtype = "bfloat16" if row["narrow"] else "float32"
            cells.append([of["model"], dtype, row["first"], row["again"], row["loss"], change])
    head = ["model", "products in", "seconds a step", "of a window that came before", "loss", "change of the loss"]
    return {"half_precision": table(head, cells)}


if __name__ == "__main__":
    run(main)
