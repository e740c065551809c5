"""`import lyapunov_prune` gives every public name, and imports what it needs when it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import lyapunov_prune

REPOSITORY = Path(lyapunov_prune.__file__).parents[1]
ROOMS = [name for name in lyapunov_prune.__all__ if isinstance(getattr(lyapunov_prune, name), ModuleType)]
NAMES = [("lyapunov_prune", name) for name in lyapunov_prune.__all__ if name not in ROOMS]
NAMES += [
    (f"lyapunov_prune.{room}", name)
    for room in ROOMS
    if room != "linalg"
    for name in import_module(f"lyapunov_prune.{room}").__all__
]
# Scripts of others rely on these.
PROMISED = {
    *("load", "load_text", "measure_contraction", "block_influence", "rank_layers", "remove_layers"),
    *("verify_removal", "perplexity", "check_bounds", "compress", "linalg", "LyapunovPruneError"),
}


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_public_name_is_what_it_says(package: str, name: str) -> None:
    if find_spec(f"{package}.{name}"):
        import_module(f"{package}.{name}")  # a file called as what it holds does not hide it
    home = import_module(package)
    assert getattr(home, name).__name__ == name
    assert name in dir(home)


def test_the_promised_names_are_there_and_few_beside_them() -> None:
    assert set(lyapunov_prune.__all__) >= PROMISED
    assert len(lyapunov_prune.__all__) - len(ROOMS) <= 30


def test_a_name_has_one_home() -> None:
    assert {name: n for name, n in Counter(name for _, name in NAMES).items() if n > 1} == {}


def test_norms_are_reached_through_linalg() -> None:
    assert lyapunov_prune.linalg.certified_norm.__name__ == "certified_norm"


def test_the_version_is_that_of_the_installed_package() -> None:
    assert lyapunov_prune.__version__ == metadata.version("lyapunov-prune")


@pytest.mark.parametrize("package", ["lyapunov_prune", "lyapunov_prune.ranking"])
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"{package} attribute unknown"):
        _ = import_module(package).unknown


def test_star_brings_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from lyapunov_prune import *", names)
    assert set(lyapunov_prune.__all__) <= names.keys()


def test_a_type_checker_sees_the_types_behind_the_names(tmp_path: Path) -> None:
    assert (REPOSITORY / "lyapunov_prune" / "py.typed").is_file()
    script = tmp_path / "script.py"
    script.write_text(
        "import lyapunov_prune as lp\n"
        'loaded = lp.load("smollm2-135m")\n'
        "reveal_type(loaded)\n"
        "reveal_type(lp.compress)\n"
        "reveal_type(lp.load_text)\n"
        "reveal_type(lp.ranking.LayerRanking.plan)\n"
        "reveal_type(lp.__version__)\n"
        "lp.unknown\n"
    )
    # Without the types of torch: they take a minute.
    command = [sys.executable, "-m", "mypy", "--no-site-packages", "--ignore-missing-imports", "--config-file=", script]
    environment = {**os.environ, "MYPYPATH": str(REPOSITORY)}
    told = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path).stdout
    for line, text in (
        (3, "lyapunov_prune.models.decoder.Decoder"),
        (4, "-> lyapunov_prune.compression.compress.Compressed"),
        (5, "-> lyapunov_prune.data.batch.TokenBatch"),
        (6, "-> lyapunov_prune.pruning.plan.PruningPlan"),
        (7, "str"),
        (8, 'Module has no attribute "unknown"'),
    ):
        assert any(text in row for row in told.splitlines() if row.startswith(f"script.py:{line}:")), told


def test_help_and_usage_errors_wait_for_no_heavy_import() -> None:
    lines = [
        "",
        "--help",
        "prune --help",
        "prune",
        "--unknown",
        "unknown",
        "rank smollm2-135m --criterion best",
        "prune smollm2-135m -o out --remove 2 --what norms",
    ]
    script = (
        "import sys\n"
        "from lyapunov_prune.cli.app import main\n"
        f"for line in {lines}:\n"
        "    sys.argv = ['lyapunov-prune', *line.split()]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'pandas', 'matplotlib', 'scipy'} & sys.modules.keys()\n"
        "    assert not heavy, (line, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_new_run_waits_for_nothing_that_draws(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from lyapunov_prune.cli.inputs import begun_run\n"
        "begun_run(None, 'model', 'eval.json')\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=tmp_path)


# One mistake for every command, and more where an option names something: none of them waits for torch.
MISTAKES = [
    "shrink ./nowhere --remove 2 -o new",
    "shrink smollm2-135m --remove 2 -o full",
    "shrink smollm2-135m --remove 2 -o new --judge gone.txt",
    "profile full",
    "profile smollm2-135m --text gone.txt",
    "rank gone.json",
    "rank smollm2-135m --protect a",
    "prune smollm2-135m --plan gone.json -o new",
    "prune smollm2-135m --layers 3,x -o new",
    "prune smollm2-135m --layers 3 -o full",
    "compress smollm2-135m --bits 4 -o new",
    "compress smollm2-135m --method rtn -o new",
    "compress smollm2-135m --method int4 -o new",
    "compress smollm2-135m --sparsity 5 -o new",
    "compress smollm2-135m --method rtn --bits 4 --allocation gone.json -o new",
    "compress gone.gguf -o new --sparsity 0.5",
    "heal full --teacher smollm2-135m -o new",
    "heal smollm2-135m -o new",
    "joint smollm2-135m -o new",
    "export smollm2-135m --quantize q4_0 -o new",
    "export gone.gguf -o new",
    "eval smollm2-135m --tasks gone.jsonl",
    "eval smollm2-135m --against ./nowhere",
    "eval smollm2-135m --limit 3",
    "check smollm2-135m ./nowhere",
    "explain smollm2-135m",
    "sensitivity smollm2-135m --study layr",
    "hierarchy smollm2-135m smollm2-135m --choices gone.jsonl",
    "cache --clean",
    "theorems all",
    "demo now",
    "report gone",
]


def test_every_command_refuses_a_mistake_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    script = (
        "import shlex, sys\n"
        "from lyapunov_prune.cli.app import COMMANDS, main\n"
        "seen = set()\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    sys.argv = ['lyapunov-prune', *shlex.split(line)]\n"
        "    seen.add(sys.argv[1])\n"
        "    try: main()\n"
        "    except SystemExit as end: code = end.code\n"
        "    assert code == 2, (code, line)\n"
        "    assert 'torch' not in sys.modules, line\n"
        "assert seen == {*COMMANDS}, seen ^ {*COMMANDS}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input="\n".join(MISTAKES), capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"full"}
    told = done.stderr.splitlines()
    assert len(told) == len(MISTAKES)
    assert "COMMAND" not in done.stderr
