"""What the experiments share: texts that do not overlap, and one store of finished measurements a model."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import typer

import lyapunov_prune as lp
from experiments.dither import dither
from lyapunov_prune.cli.inputs import folder_name
from lyapunov_prune.data.batch import Split, require_disjoint
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.task_scores import ScoredTask
from lyapunov_prune.profiles.profile import LayerProfile, kept_profile
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.sweep import Job, Sweep

# Options of every experiment beside --model.
Device = Annotated[str, typer.Option(help="cpu, cuda, …; auto is the GPU if there is one")]
DType = Annotated[str | None, typer.Option(help="of the weights; the checkpoint's if not given")]
Each = Annotated[list[str] | None, typer.Option(help="a text; of several, each alone", show_default="builtin")]
Learnt = Annotated[str, typer.Option(help="the text to choose, mend and learn from")]
Unseen = Annotated[str, typer.Option(help="the text to score on")]
Other = Annotated[str | None, typer.Option(help="a text to measure on; the other half of --text if not given")]
Scored = Annotated[int, typer.Option(help="tokens of --unseen")]
Again = Annotated[bool, typer.Option("--again", help="measure anew what is kept beside run.py already")]
BUILT_IN = "smollm2-135m"
DITHERED = "-dithered-"  # MODEL-dithered-SEED is the model off its grid, see dither.py
# The paper keeps 5 % of the entries (§3 calls that sparsity 5 %) at rank 16.
SPARSITY, RANK = 0.95, 16


@dataclass(frozen=True)
class Model:
    """The options --model, --device and --dtype of an experiment."""

    name: str = BUILT_IN
    device: str = "auto"
    dtype: str | None = None

    def load(self) -> lp.models.Decoder:
        """The model under its plain name: results are committed."""
        name, _, seed = self.name.partition(DITHERED)
        loaded = lp.load(name, device=self.device, dtype=self.dtype)
        if seed:
            loaded = dither(loaded, int(seed)).decoder
        loaded.model.config._name_or_path = plain(self.name)
        return loaded

    @property
    def jobs(self) -> Path:
        return job_folder(self.name)

    def folder(self, here: Path) -> Path:
        return of_model(here, self.name)


def run(main: Callable[..., None]) -> None:
    """Run `main` as a command."""
    typer.run(flat(main))


def flat(main: Callable[..., None]) -> Callable[..., None]:
    """`main` as typer takes it: in place of its `Model` the options that it is made of."""
    others = dict(inspect.signature(main, eval_str=True).parameters)
    given = others.pop("model", None)
    if given is None or not isinstance(given.default, Model):
        return main
    name, device, dtype = given.default.name, given.default.device, given.default.dtype
    option = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    options = [
        option("model", default=name, annotation=str),
        option("device", default=device, annotation=Device),
        option("dtype", default=dtype, annotation=DType),
        *(option(each.name, default=each.default, annotation=each.annotation) for each in others.values()),
    ]

    @functools.wraps(main)
    def command(*, model: str, device: str, dtype: str | None, **given: Any) -> None:
        main(model=Model(model, device, dtype), **given)

    command.__annotations__ = {each.name: each.annotation for each in options}
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return command


def is_kept(file: Path, again: bool) -> bool:
    """Whether the measurement in `file` stays as it is: it is there, and was not asked for `again`. Says so."""
    if again or not file.exists():
        return False
    print(f"already measured, see {file}; give --again to measure it anew")
    return True


def show(tables: dict[str, str]) -> None:
    """Print the tables of an experiment, without the single numbers that sentences of its page ask for."""
    print(*(part for part in tables.values() if "\n" in part), sep="\n")


def run_command(main: Callable[..., None], result: Path, written: Callable[..., dict[str, str]]) -> None:
    """Run the command of an experiment, `main`, unless its `result` is there and --again is not given.

    Then print the tables of `written`. `result` lies beside run.py, or of another model in a folder by its name
    (`of_model`). With `{model}` in its name all models lie beside run.py; `{text}` is a file a text.
    """
    main = flat(main)
    options = inspect.signature(main).parameters
    default = options["model"].default if "model" in options else BUILT_IN

    @functools.wraps(main)
    def command(*, again: bool = False, **given: Any) -> None:
        model = given.get("model", default)
        texts = (given.get("text") or ["builtin"]) if "{text}" in result.name else [""]
        folder = result.parent if "{model}" in result.name else of_model(result.parent, model, default)
        name = result.name.replace("{model}", Path(plain(model)).name)
        files = {text: folder / name.replace("{text}", Path(plain(text)).stem) for text in texts}
        if missing := [text for text, file in files.items() if not is_kept(file, again)]:
            main(**given | ({"text": missing} if "{text}" in result.name else {}))
        show(written(folder) if inspect.signature(written).parameters else written())

    again = inspect.Parameter("again", inspect.Parameter.KEYWORD_ONLY, default=False)
    hints = get_type_hints(main, include_extras=True) | {"again": Again}
    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(annotation=hints[each.name]) for each in (*options.values(), again)]
    )
    typer.run(command)


@dataclass(frozen=True)
class Inputs:
    loaded: lp.models.Decoder
    calibration: lp.TokenBatch
    evaluation: lp.TokenBatch
    jobs: Path

    @property
    def origins(self) -> tuple[MeasuredOn, MeasuredOn]:
        """Of the calibration text and of the evaluation text."""
        return self.calibration.measured_on(self.loaded.model), self.evaluation.measured_on(self.loaded.model)

    def profile(self) -> LayerProfile:
        """Contraction and Block Influence on the calibration text, measured once."""
        path = self.jobs / f"profile-{self.calibration.text_hash[:16]}.json"
        return kept_profile(path, self.loaded.model, self.calibration)

    @property
    def sweep_folder(self) -> Path:
        """Where losses on the evaluation text are kept, of this dtype and this device."""
        model = self.loaded.model
        where = f"{str(model.dtype).removeprefix('torch.')}-{model.device.type}"
        return self.jobs / f"sweep-{self.evaluation.text_hash[:16]}-{where}"

    def sweep(self) -> Sweep:
        """A sweep whose jobs are those of `measure_sensitivity` in the same folder."""
        also = {"calibration": self.calibration.text_hash}
        return Sweep(self.loaded.model, self.evaluation, folder=self.sweep_folder, also=also)

    def without(self, sets: Iterable[tuple[int, ...]]) -> tuple[np.ndarray, dict[tuple[int, ...], np.ndarray]]:
        """The loss of every evaluation window of the dense model, and without each of some sets of layers."""
        jobs = {gone: Job(Change("removal", "", remove=gone).key, min(gone), remove=gone) for gone in sets}
        with self.sweep() as sweep:
            outcomes = sweep.run(jobs.values(), "removal")
            dense = sweep.dense
        return dense, {gone: outcomes[job.key].windows for gone, job in jobs.items()}

    def sensitivity(
        self, studies: Sequence[str], *, sparsity: float = SPARSITY, rank: int | None = RANK
    ) -> lp.sensitivity.Sensitivity:
        """The studies, at the paper's setting if no other is given; what another experiment has measured is kept."""
        return lp.measure_sensitivity(
            self.loaded.model,
            self.evaluation,
            studies=studies,
            sparsity=sparsity,
            rank=rank,
            calibration=self.calibration,
            profile=self.profile(),
            folder=self.jobs / f"sensitivity-{self.evaluation.text_hash[:16]}",
            batch_size=2,
        )


def inputs(model: Model, text: str, tokens: int, context: int, *, unseen: str | None = None) -> Inputs:
    """The model, `tokens` tokens to measure scores on and as many others to measure perplexity on.

    They are the two halves of `text`; where a text `unseen` is given, the beginnings of `text` and of `unseen`.
    """
    loaded = model.load()
    if unseen is None:
        calibration, evaluation = texts(loaded, text, calibration=tokens, evaluation=tokens, context=context)
    else:
        calibration, evaluation = (read_text(loaded, file, tokens, context, "all") for file in (text, unseen))
        require_disjoint(calibration, evaluation)
    return Inputs(loaded, calibration, evaluation, model.jobs)


def on_each_text(measure: Callable[[Inputs], Any], here: Path) -> Callable[..., None]:
    """The command of an experiment that measures every --text alone, and writes MODEL-TEXT.json into `here` of each.

    `measure` gives a Result that says what it was `measured_on`.
    """

    def main(
        model: Model = Model(),
        text: Each = None,
        tokens: int = 4096,
        context: int = 512,
    ) -> None:
        measure_each(measure, here, model, text, tokens, context)

    return main


def measure_each(
    measure: Callable[[Inputs], Any],
    here: Path,
    model: Model,
    text: Sequence[str] | None,
    tokens: int,
    context: int,
) -> None:
    """What the command of `on_each_text` does; for experiments with options of their own."""
    for source in text or ["builtin"]:
        found = measure(inputs(model, source, tokens, context))
        found.save(here / f"{found.measured_on.model.name}-{Path(found.measured_on.text).stem}.json")


def job_folder(model: str) -> Path:
    """Where finished measurements of a model are kept."""
    return Path("runs") / "experiments" / folder_name(model)


def of_model(here: Path, model: str, default: str = BUILT_IN) -> Path:
    """Where an experiment writes its results: beside run.py of its default model, in a folder by its name of another.

    A README.md asks for what `written()` makes of that folder by `<!-- FOLDER NAME -->`, see tools/tables.py.
    """
    return here if model == default else here / Path(plain(model)).name


def plain(source: str) -> str:
    """The name of a model, a text or a task without the folders of this machine that it lies in."""
    name, *seed = source.partition(DITHERED)
    name = Path(os.path.abspath(name)).name.removesuffix(".gguf") if Path(name).exists() else name
    return "".join((name, *seed))


def read_text(
    loaded: lp.models.Decoder, source: str, tokens: int, context: int, split: Split = "calibration"
) -> lp.TokenBatch:
    """The text under its plain name."""
    return replace(
        lp.load_text(source, loaded.tokenizer, tokens=tokens, context=context, split=split), text=plain(source)
    )


def plain_tasks(tasks: Iterable[ScoredTask]) -> tuple[ScoredTask, ...]:
    """What was scored, under the plain names of the files."""
    return tuple(replace(task, source=plain(task.source)) for task in tasks)


def draw(folder: Path, figures: dict[str, str]) -> None:
    """Write the SVG texts beside the experiment that they belong to."""
    for name, svg in figures.items():
        write_whole(folder / f"{name}.svg", svg)


def texts(
    loaded: lp.models.Decoder, text: str, *, calibration: int, evaluation: int, context: int, unseen: str | None = None
) -> tuple[lp.TokenBatch, lp.TokenBatch]:
    """So many tokens of the two halves of a text, which share nothing; the second from a text `unseen` if given."""
    first = read_text(loaded, text, calibration, context)
    second = read_text(loaded, unseen or text, evaluation, context, "all" if unseen else "evaluation")
    require_disjoint(first, second)
    return first, second


def halves(calibration: lp.TokenBatch) -> tuple[lp.TokenBatch, lp.TokenBatch]:
    """Calibration text to compress by, and calibration text to measure a regret on that then decides something."""
    half = len(calibration.ids) // 2
    return replace(calibration, ids=calibration.ids[:half]), replace(calibration, ids=calibration.ids[half:])


def committed() -> str:
    """The last commit that changed the package. Raises LyapunovPruneError if the package differs from it."""
    repository = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", repository, *words], check=True, capture_output=True, text=True).stdout

    if git("status", "--porcelain", "--", "lyapunov_prune"):
        raise LyapunovPruneError("lyapunov_prune/ has changes that no commit names; commit them, or put them aside")
    return git("log", "-1", "--abbrev=12", "--format=%h", "--", "lyapunov_prune").strip()
