"""Does mending or healing heal it: how far state, logits and probabilities turn before and after (representation
hierarchies, §4: the logits turn less than the state, the probabilities more).

    python experiments/4_hierarchy/healed_spaces/run.py [--model MODEL] --text A.txt --unseen B.txt

Layers go by the default criterion; the gaps are mended, and the mended model healed, on the beginning of `--text`. Each
of the three models reads what the dense model writes after the windows of `--unseen`, and what it writes itself. Writes
spaces.json beside this file, of another model in a folder by its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Learnt, Model, Scored, run_command
from experiments.statements import bullets, mean, ratio, runs, table
from experiments.unseen import OnUnseenText, recovered, two_texts
from lyapunov_prune.ranking.table import DEFAULT
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
STEPS = 100  # of healing
SPACES = ("state h", "logits z", "probabilities p")


@dataclass(frozen=True)
class Spaces:
    """A model beside the dense one, a row a prompt: `1 − cos` of h, z and p, and KL, where it reads the dense text.

    `kl_own` is KL where it reads its own. `windows` are its losses on the unseen text.
    """

    state: str
    turned: np.ndarray
    kl: np.ndarray
    kl_own: np.ndarray
    windows: np.ndarray


@dataclass(frozen=True)
class HealedSpaces(OnUnseenText):
    removed: tuple[int, ...]
    states: tuple[Spaces, ...]
    steps: int

    DONE: ClassVar[str] = "chosen, mended and healed on"

    def headline(self) -> str:
        return (
            f"Without layers {runs(self.removed)} by `{DEFAULT}`: the first {self.steps} tokens after each of "
            f"{len(self.states[0].kl)} windows, and losses: {super().headline()}"
        )


def main(
    text: Learnt,
    unseen: Annotated[str, typer.Option(help="to score on, and to begin texts with")],
    model: Model = Model(),
    remove: int = 4,
    tokens: int = 16384,
    scored: Scored = 4096,
    context: int = 256,
    begins: Annotated[int, typer.Option(help="tokens of a window that a text begins with")] = 64,
    steps: Annotated[int, typer.Option(help="tokens of each text")] = 32,
) -> None:
    loaded = model.load()
    learnt, judged, origins = two_texts(loaded, (text, tokens), (unseen, scored), context, context)
    removed = lp.rank(loaded.model, learnt, criterion=DEFAULT).plan(remove).remove
    about = {"texts": encode(origins), "removed": removed, "begins": begins, "steps": steps}
    with Store(model.jobs / "healed-spaces", "healed spaces", about) as store:
        for name, make in recovered(loaded.model, removed, learnt, STEPS).items():
            if name not in store:
                store.add(name, compared(loaded.model, make(), judged, begins, steps))
        rows = {name: {key: np.array(x) for key, x in store[name].items()} for name in ("cut", "mended", "healed")}
    dense = lp.perplexity(loaded.model, judged).windows
    states = tuple(Spaces(name, **row) for name, row in rows.items())
    found = HealedSpaces(dense, *origins, removed, states, steps)
    found.save(model.folder(HERE) / "spaces.json")


def compared(
    dense: PreTrainedModel, model: PreTrainedModel, judged: lp.TokenBatch, begins: int, steps: int
) -> dict[str, list[object]]:
    """Prompt by prompt, for intervals."""
    found = [
        lp.predictions.history_divergence(dense, model, replace(judged, ids=ids[None, :begins]), steps=steps)
        for ids in judged.ids
    ]
    kl, kl_own = zip(*(history.mean_kl() for history in found), strict=True)
    windows = lp.perplexity(model, judged).windows.tolist()
    return {"turned": [h.spaces() for h in found], "kl": [*kl], "kl_own": [*kl_own], "windows": windows}


def written(folder: Path = HERE) -> dict[str, str]:
    found = HealedSpaces.load(folder / "spaces.json")
    return {"setting": setting(found), "spaces": spaces(found), **left(found)}


def setting(found: HealedSpaces) -> str:
    return bullets(found.headline(), f"healed: {STEPS} steps of one window, from mended")


def spaces(found: HealedSpaces) -> str:
    head = ("", "perplexity / dense", *(f"1 − cos of the {space}" for space in SPACES), "p / h", "KL", "KL, own text")
    rows = []
    for state in found.states:
        means = [mean(x) for x in (*state.turned.T, state.kl, state.kl_own)]
        rows.append((state.state, ratio(state.windows - found.dense), *means[:3], ratio(amplified(state)), *means[3:]))
    return table(head, rows)


def amplified(state: Spaces) -> np.ndarray:
    """The logarithm, prompt by prompt in order, of how much more the probabilities turn than the state."""
    return np.log(state.turned[:, 2] / state.turned[:, 0])


def left(found: HealedSpaces) -> dict[str, str]:
    """Of what the cut turns, what is left in each space, a geometric mean over prompts; its logits over its state."""
    cut, *others = found.states
    shares = {
        f"{state.state}-{space.split()[0]}": ratio(np.log(after / before))
        for state in others
        for space, before, after in zip(SPACES, cut.turned.T, state.turned.T, strict=True)
    }
    h, z, _ = cut.turned.T
    return {"z-over-h": ratio(np.log(z / h)), **shares}


if __name__ == "__main__":
    run_command(main, HERE / "spaces.json", written)
