"""Which text to mend and heal by, where none like the reader's is at hand, and who can tell (no paper).

    python experiments/6_recovery/texts_to_mend_by/run.py [--model MODEL] --text A.txt --unseen B.txt

A quarter of the layers goes, the same run of layers whatever the text. The gap is mended on the built-in text, on the
beginning of `--text`, on what the dense model writes itself at three temperatures, and on halves of two of these; two
of these models are then healed on the same text, by updates of low rank. Each is scored on the beginning of `--unseen`
and by what could judge it: the second halves of both texts, and other windows that the model wrote. Writes MODEL.json
beside this file; what all of them say goes into README.md by `make tables`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, Scored, Unseen, plain, read_text, run_command
from experiments.statements import bullets, ratio, runs, table
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
TEMPERATURES = (1.0, 0.7, 1.3)
UNSEEN = "unseen"
HEALED, RANK = ("builtin", f"self, T = {TEMPERATURES[0]:g}"), 8  # lessons, and the rank of the updates


@dataclass(frozen=True)
class Taught:
    """Mended, or `healed` from there, on the text `by`: the loss of every window of each text that scores, by name."""

    by: str
    healed: bool
    windows: dict[str, np.ndarray]


@dataclass(frozen=True)
class TextsToMendBy(Result):
    """`dense` and `cut` as `Taught.windows`; of these texts `unseen` decides nothing, and the others might judge."""

    removed: tuple[int, ...]
    dense: dict[str, np.ndarray]
    cut: dict[str, np.ndarray]
    taught: tuple[Taught, ...]
    tokens: int
    measured_on: MeasuredOn

    def over_cut(self, taught: Taught, scored: str = UNSEEN) -> np.ndarray:
        return taught.windows[scored] - self.cut[scored]

    def self_over_builtin(self, healed: bool) -> np.ndarray:
        """Losses by the text that the model wrote at temperature 1 less those by the built-in text."""
        own, builtin = (next(t for t in self.taught if t.healed == healed and t.by == by) for by in reversed(HEALED))
        return own.windows[UNSEEN] - builtin.windows[UNSEEN]

    def headline(self) -> str:
        return f"{self.measured_on.line()}; without layers {runs(self.removed)}, mended on {self.tokens} tokens"


def main(
    text: Annotated[str, typer.Option(help="a text like that which the model will read")],
    unseen: Unseen,
    model: Model = Model(device="cpu"),
    tokens: Annotated[int, typer.Option(help="to mend on")] = 4096,
    context: int = 256,
    judged: Annotated[int, typer.Option(help="tokens of each text that could judge")] = 2048,
    scored: Scored = 4096,
    steps: Annotated[int, typer.Option(help="of healing, a window a step; 0 heals nothing")] = 24,
) -> None:
    loaded = model.load()
    jobs = model.jobs / "texts-to-mend-by"

    def own(temperature: float, seed: int, n: int) -> lp.TokenBatch:
        folder = jobs / f"self-{temperature:g}-{seed}"
        how: dict[str, Any] = {"temperature": temperature, "seed": seed, "folder": folder}
        return lp.self_generated(loaded.model, tokens=n, context=context, **how)

    user = plain(text)
    lessons: dict[str, Callable[[], lp.TokenBatch]] = {
        "builtin": partial(read_text, loaded, "builtin", tokens, context),
        user: partial(read_text, loaded, text, tokens, context),
        **{f"self, T = {t:g}": partial(own, t, 0, tokens) for t in TEMPERATURES},
    }
    own_text = f"self, T = {TEMPERATURES[0]:g}"
    for other in ("builtin", user):
        lessons[f"half {own_text}, half {other}"] = partial(halved, lessons[own_text], lessons[other])
    judges = {
        UNSEEN: read_text(loaded, unseen, scored, context, "all"),
        "builtin": read_text(loaded, "builtin", judged, context, "evaluation"),
        user: read_text(loaded, text, judged, context, "evaluation"),
        "self": own(1.0, 1, judged),
    }
    found = measure(loaded, lessons, judges, tokens, steps, jobs)
    found.save(HERE / f"{loaded.model.config._name_or_path}.json")


def halved(first: Callable[[], lp.TokenBatch], second: Callable[[], lp.TokenBatch]) -> lp.TokenBatch:
    """As many tokens, two windows of the one and two of the other in turn: every fourth window, which chooses the form
    of a map, is of the second."""
    a, b = (make().ids for make in (first, second))
    pairs = min(len(a), len(b)) // 4
    rows = [rows[2 * k : 2 * k + 2] for k in range(pairs) for rows in (a, b)]
    return replace(first(), ids=torch.cat(rows), text=f"half {first().text}, half {second().text}")


def measure(
    loaded: lp.models.Decoder,
    lessons: dict[str, Callable[[], lp.TokenBatch]],
    judges: dict[str, lp.TokenBatch],
    tokens: int,
    steps: int,
    folder: Path,
) -> TextsToMendBy:
    model = loaded.model
    ranked = lp.rank(model, judges["builtin"], criterion="angular", remove=0.25)
    removed = ranked.plan(0.25).remove
    origins = {name: batch.measured_on(model) for name, batch in judges.items()}
    about = {"judged": encode(origins), "removed": list(removed), "tokens": tokens}
    with Store(folder / "scores", "texts to mend by", about) as store:

        def windows(key: str, make: Callable[[], PreTrainedModel]) -> dict[str, np.ndarray]:
            if key not in store:
                made = make()
                scores = {
                    name: lp.perplexity(made, batch, description=f"{key} on {name}").windows.tolist()
                    for name, batch in judges.items()
                }
                store.add(key, scores)
            return {name: np.array(values) for name, values in store[key].items()}

        dense, cut = windows("dense", lambda: model), windows("cut", lambda: lp.remove_layers(model, removed))
        taught = []
        for name, lesson in lessons.items():
            batch = lesson()
            require_disjoint(batch, judges[UNSEEN])
            mend = partial(lp.mend, model, removed, batch)
            taught.append(Taught(name, False, windows(name, mend)))
            if steps and name in HEALED:

                def heal(mend: Callable[[], Any] = mend, batch: lp.TokenBatch = batch) -> Any:
                    return lp.heal(mend(), model, batch, steps=steps, rank=RANK).model

                taught.append(Taught(name, True, windows(f"{name}, healed {steps}", heal)))
    return TextsToMendBy(removed, dense, cut, tuple(taught), tokens, origins[UNSEEN])


def written() -> dict[str, str]:
    results = [TextsToMendBy.load(path) for path in sorted(HERE.glob("*.json"))]
    (one,) = results
    return {
        "setting": setting(results),
        "taught": taught_by(results),
        "mended": ratio(one.self_over_builtin(False)),
        "healed": ratio(one.self_over_builtin(True)),
    }


def setting(results: list[TextsToMendBy]) -> str:
    return bullets(*(f"{r.headline()}; dense {ratio(r.dense[UNSEEN])}, cut {ratio(r.cut[UNSEEN])}" for r in results))


def taught_by(results: list[TextsToMendBy]) -> str:
    """Perplexity over that of the cut model, on what is unseen and on what could judge."""
    rows = []
    for r in results:
        for t in r.taught:
            state = "healed" if t.healed else "mended"
            short_ratios = (float(np.exp(r.over_cut(t, name).mean())) for name in r.dense if name != UNSEEN)
            rows.append((r.measured_on.model.name, state, _plain(t.by), ratio(r.over_cut(t)), *short_ratios))
    return table(("model", "", "by", "on the unseen text", "on builtin", "on the user's", "on its own"), rows)


def _plain(name: str) -> str:
    return name.removesuffix(".tokens")


if __name__ == "__main__":
    run_command(main, HERE / "{model}.json", written)
