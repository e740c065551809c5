"""What the experiments on the two small trained models share: changed models beside the dense one, on unseen text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from experiments.common import Inputs, Model, inputs, plain
from experiments.divergences import divergences, finals, losses
from experiments.statements import mean, ratio
from lyapunov_prune.forward.reading import read
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.store import Store

TOKENS, CONTEXT = 4096, 128
MODELS = Path("runs") / "experiments" / "small_models"


class Changed:
    """Loss and KL from the dense model of every window of the evaluation text, one entry a changed model, by name."""

    def __init__(self, given: Inputs, store: Store) -> None:
        self.given, self.store = given, store
        self.reading = read(given.loaded, given.evaluation)
        self.dense = list(finals(self.reading, given.loaded.model))

    @torch.no_grad()
    def add(self, name: str, make: Callable[[], tuple[PreTrainedModel, dict[str, Any]]]) -> None:
        """Measure the model that `make` gives, with what else is to be kept of it, unless it has been measured."""
        if name in self.store:
            return
        with torch.enable_grad():
            model, more = make()
        after = list(finals(self.reading, model.eval()))
        kl = divergences(self.reading, self.dense, after)
        self.store.add(
            name, {"loss": losses(self.reading, after), "kl": kl, "parameters": model.num_parameters(), **more}
        )
        print(f"{name}: KL {np.mean(kl):.4f} {more}", flush=True)


@contextmanager
def changed(model: Model, kind: str) -> Iterator[Changed]:
    """The model, its texts, and what has been measured of it before."""
    given = inputs(model, "builtin", TOKENS, CONTEXT)
    about = {
        "model": given.evaluation.measured_on(given.loaded.model).model.weights,
        "text": given.evaluation.text_hash,
    }
    with Store(given.jobs / kind, kind, about) as store:
        yield Changed(given, store)


def keep(file: Path, found: Changed, names: list[str], **more: Any) -> None:
    """Write what was measured of the models `names`, beside the dense one."""
    given = found.given
    content = {
        "model": plain(given.loaded.model.config._name_or_path),
        "measured on": given.evaluation.measured_on(given.loaded.model).line(),
        "calibrated on": given.calibration.measured_on(given.loaded.model).line(),
        "parameters": given.loaded.model.num_parameters(),
        "dense": losses(found.reading, found.dense),
        "changed": {name: found.store[name] for name in names},
        **more,
    }
    write_whole(file, json.dumps(rounded(content), indent=1, allow_nan=False) + "\n")


def rounded(value: Any) -> Any:
    """Floats to six digits, in lists and dictionaries too: files are committed."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def kl_of(rows: list[dict[str, Any]]) -> str:
    """The mean KL with its interval over windows; of several models the mean of them."""
    return mean(np.mean([row["kl"] for row in rows], 0))


def over(row: dict[str, Any], dense: list[float]) -> str:
    """Perplexity over the dense model's, with the interval of the quotient, paired by window."""
    return ratio(np.array(row["loss"]) - np.array(dense))


def gone(plan: PruningPlan) -> dict[str, Any]:
    """What goes, by layer, for a file."""
    experts = plan.gone.experts_gone
    listed = [list(experts.get(layer, ())) for layer in range(plan.model.num_layers)] if experts else []
    return {"layers": list(plan.remove), "experts": listed}
