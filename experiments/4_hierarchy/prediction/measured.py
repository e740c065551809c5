"""The divergence of every set of `prediction.json`, measured.

    python experiments/4_hierarchy/prediction/measured.py [--model MODEL] [--text FILE]

KL(dense ‖ without the set) on the first tokens of the calibration text of run.py, all layers of a set out together.
Sets whose estimate is above MOST are wrecks that no budget allows, and are left out. Writes measured.json beside
prediction.json; interrupted, it goes on.
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from experiments.common import Model, run, texts
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.forward.reading import read
from lyapunov_prune.predictions.divergence import divergences_of
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
MOST = 5.0  # nats a token
TOGETHER = 4  # sets for which the dense logits are formed once


@torch.no_grad()
def main(
    model: Model = Model(),
    text: str = "builtin",
    tokens: int = 4096,
    length: Annotated[int, typer.Option(help="tokens of the calibration text, at most 512")] = 512,
) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    loaded.model.eval()
    known = json.loads((folder / "prediction.json").read_text(encoding="utf-8"))
    calibration, _ = texts(loaded, text, calibration=tokens // 2, evaluation=tokens, context=512)
    if calibration.text_hash != known["calibration"]["text_hash"]:
        raise SystemExit("the text is not that of prediction.json")
    window = TokenBatch(
        calibration.ids[:1, :length], text=calibration.text, split=calibration.split, bos=calibration.bos
    )
    reading = read(loaded, window)
    sets = [tuple(each["removed"]) for each in known["sets"] if each["kl"] <= MOST]
    drawn = [
        sets[i] for i in np.random.default_rng(0).permutation(len(sets))
    ]  # an interrupted run has some of every kind
    with Store(model.jobs / f"measured-{window.text_hash[:16]}", "measured", {}) as jobs:
        left = [each for each in drawn if ",".join(map(str, each)) not in jobs]
        for start in range(0, len(left), TOGETHER):
            some = left[start : start + TOGETHER]
            changes = [(min(each), partial(reading.prefix.without, each)) for each in some]
            for each, kl in zip(some, divergences_of(reading, changes, 1.0, 1, "sets")[:, 1], strict=True):
                jobs.add(",".join(map(str, each)), float(kl))
            done = [each for each in sets if ",".join(map(str, each)) in jobs]
            rows = [{"removed": list(each), "kl": jobs[",".join(map(str, each))]} for each in done]
            content = {"measured_on": encode(window.measured_on(loaded.model)), "sets": rows}
            write_whole(folder / "measured.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run(main)
