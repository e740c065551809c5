"""The rules of the house: imports point one way, what depends on a family stays in `models/`, tests mirror rooms."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "lyapunov_prune"
FAMILY_WORDS = {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "opt"}


def modules() -> dict[str, Path]:
    names = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name: path for name, path in names.items() if not name.endswith("__init__")}


def lint(root: Path) -> str:
    """What import-linter says of the package in `root`, by the contracts in its pyproject.toml."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=root, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_imports_point_one_way() -> None:
    assert "Contracts: 2 kept, 0 broken." in lint(REPOSITORY)


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("linalg.py", "from lyapunov_prune.forward import hooks", "order of rooms"),
        ("profiles/influence.py", "from lyapunov_prune.evaluation import perplexity", "order of rooms"),
        ("ranking/ranking.py", "from lyapunov_prune.ranking import oracle, kl", "cycle between files"),
        ("strange.py", "x = 1", "order of rooms"),
    ],
    ids=["back", "neighbours", "files", "a module outside"],
)
def test_a_planted_import_is_seen(module: str, line: str, contract: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "lyapunov_prune", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    with (tmp_path / "lyapunov_prune" / module).open("a") as file:
        file.write(f"\n{line}\n")
    told = lint(tmp_path)
    assert "Contracts: 2 kept" not in told
    assert contract in told


def test_tests_mirror_rooms() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    mirrored = {path.parent.name for path in (REPOSITORY / "tests").glob("*/test_*.py")}
    assert mirrored - rooms == {"families"}


def test_the_head_of_a_room_names_its_files() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for name in modules():
        room, _, file = name.partition(".")
        if file and "." not in file and file != "__main__" and (room != "report" or file not in rooms):
            assert f"`{file}`" in (PACKAGE / room / "__init__.py").read_text(), name


def test_the_report_never_sees_a_model() -> None:
    for name in [n for n in modules() if n.startswith("report.")]:
        assert "transformers" not in modules()[name].read_text()
        assert "import torch" not in modules()[name].read_text()


def test_pandas_is_imported_where_it_waits_for_the_first_table() -> None:
    assert [name for name, path in modules().items() if "import pandas" in path.read_text()] == ["results.frames"]


def test_no_module_outside_models_names_a_family() -> None:
    for name, path in modules().items():
        if name.startswith("models."):
            continue
        tree = ast.parse(path.read_text())
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not strings & FAMILY_WORDS, name


def test_the_citation_is_of_this_version() -> None:
    told = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{told["version"]}"' in project
    assert f'license = "{told["license"]}"' in project
