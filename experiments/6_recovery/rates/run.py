"""Which constant peak rate of healing is best on which model: absolute, and as a share of each parameter's size.

    python experiments/6_recovery/rates/run.py --model MODEL --text A.txt --unseen B.txt --out FILE.jsonl \
        [--device cuda]

Layers go by `best`; then the cut model is distilled from the same weights, at one rate after the other, for as many
steps on the same windows in the same order. One JSON line a rate is added to --out: the loss over that of the dense
model on --unseen (nats a token), and the loss of the judging windows on the way. The table of all files beside this one
goes into README.md by `make tables`.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import lyapunov_prune as lp
from experiments.common import Model, Unseen, read_text, run
from experiments.statements import table
from lyapunov_prune.data.batch import Split
from lyapunov_prune.errors import Diverged
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.reading import read
from lyapunov_prune.healing.distillation import Distillation, update_sizes
from lyapunov_prune.healing.rounds import schedule
from lyapunov_prune.healing.trained import drawn_order, trained
from lyapunov_prune.results.encoding import encode

HERE = Path(__file__).parent
ABSOLUTE, SHARES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4), (3e-4, 1e-3, 3e-3)
JUDGED_AFTER = (4, 10, 25, 50, 75, 100)


def main(
    unseen: Unseen,
    out: Annotated[Path, typer.Option(help="the file that gets a line a rate")],
    model: Model = Model(dtype="float32"),
    text: str = "builtin",
    share: Annotated[float, typer.Option(help="of the layers that go")] = 0.25,
    steps: int = 100,
    windows: int = 128,
) -> None:
    loaded = model.load()
    teacher = loaded.model
    split: Split = "calibration" if text == "builtin" else "all"
    lesson = read_text(loaded, text, 256 * windows, 256, split)
    learnt, judging = apart(read(lp.wrap(teacher), lesson), most=16)
    scored = read_text(loaded, unseen, 8192, 512, "all")
    dense = lp.perplexity(teacher, scored).nll
    count = max(1, round(share * loaded.structure.num_layers))
    chosen = read_text(loaded, text, 12 * 512, 512, split)
    plan = lp.rank(teacher, chosen, criterion="best", remove=count, search=25.0).plan(count)
    cut = lp.remove_layers(teacher, plan)
    about = {"model": Path(model.name).stem, "share": share, "removed": list(plan.remove)}
    batches = {"measured_on": scored, "learnt_on": lesson, "chosen_on": chosen}
    read_from = {name: encode(batch.measured_on(teacher)) for name, batch in batches.items()}
    _add(out, about | {"rate": None, "over": lp.perplexity(cut, scored).nll - dense} | read_from)
    for relative, rates in ((False, ABSOLUTE), (True, SHARES)):
        for rate in rates:
            taught = copy.deepcopy(cut)
            judged: dict[int, float] = {}
            with trained(taught, None, 0) as parameters:
                sizes = update_sizes(taught, parameters) if relative else None
                run = Distillation(taught, teacher, parameters, 1.0, sizes=sizes)
                try:
                    for step, window in enumerate(drawn_order(len(learnt.batch), steps, 0)):
                        run.take_step(learnt.batch.ids[window][None], rate * schedule(step, steps))
                        if step + 1 in JUDGED_AFTER:
                            judged[step + 1] = lp.perplexity(taught, judging).nll
                    over = lp.perplexity(taught, scored).nll - dense
                except Diverged:
                    over = None
            _add(out, about | {"relative": relative, "rate": rate, "over": over, "judged": list(judged.values())})
            torch.cuda.empty_cache()


def _add(out: Path, row: dict[str, Any]) -> None:
    with out.open("a") as file:
        print(json.dumps(row), file=file, flush=True)


def written() -> dict[str, str]:
    rows = [json.loads(line) for path in sorted(HERE.glob("*.jsonl")) for line in path.read_text().splitlines()]
    columns = [(False, rate) for rate in ABSOLUTE] + [(True, rate) for rate in SHARES]
    found: dict[tuple[str, float], dict[Any, float]] = defaultdict(dict)
    for row in rows:
        found[row["model"], row["share"]][row.get("relative"), row["rate"]] = row["over"]
    head = ["model, share removed", "cut", *(f"{rate:g}" + (" of the size" if of else "") for of, rate in columns)]
    cells = [
        [f"{model}, {share:g}", over[None, None], *(over.get(column) for column in columns)]
        for (model, share), over in sorted(found.items())
    ]
    return {"rates": table(head, cells)}


if __name__ == "__main__":
    run(main)
