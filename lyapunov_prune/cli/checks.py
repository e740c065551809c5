"""What an option names, looked for before torch is imported: files, folders, models, texts, names in a table."""

from __future__ import annotations

from pathlib import Path

from lyapunov_prune.cli.records import Held
from lyapunov_prune.errors import LyapunovPruneError, like_named


def _model(name: str) -> None:
    from lyapunov_prune.models.names import require_model

    require_model(name)


def _text(source: str) -> None:
    from lyapunov_prune.data.sources import SELF, require_source

    if source != SELF:
        require_source(source)


def _measured(name: str) -> None:
    if name.endswith(".json"):
        _file(Path(name))
    else:
        _model(name)


def _file(path: Path) -> None:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else f"is not there{like_named(path)}"
        raise LyapunovPruneError(f"{path} {what}; give a file")


def _there(path: Path) -> None:
    if not path.exists():
        raise LyapunovPruneError(
            f"{path} is not there{like_named(path)}; give a folder of results, or one of its files"
        )


def _new(target: Path) -> None:
    from lyapunov_prune.results.files import require_empty

    require_empty(target, folder=target.suffix != ".gguf")


def _folder(run: Path) -> None:
    from lyapunov_prune.results.files import require_writable

    require_writable(run)


def _files(names: str) -> None:
    for name in map(str.strip, names.split(",")):
        if name.endswith((".jsonl", ".tsv")):
            _file(Path(name))


def _schedule(name: str) -> None:
    from lyapunov_prune.allocation.table import SCHEDULES

    if name.endswith(".json"):
        _file(Path(name))
    elif not Path(name).is_file():
        SCHEDULES[name]  # refuses one that there is not


def _size(size: str) -> None:
    from lyapunov_prune.budget.size import parsed_size

    parsed_size(size)


MODEL = Held(_model)
MEASURED = Held(_measured)
TEXT = Held(_text)
FILE = Held(_file)
THERE = Held(_there)
NEW = Held(_new)
RUN = Held(_folder)
ITEMS = Held(_files)
SCHEDULE = Held(_schedule)
SIZE = Held(_size)
