"""What docs/adding calls complete is complete: each example is one file and one row, and its command runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import WEIGHTS, edit_json
from helpers.forked import FORKED
from safetensors.torch import load_file, save_file

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "lyapunov_prune"
PAGES = "".join(page.read_text(encoding="utf-8") for page in sorted((REPOSITORY / "docs" / "adding").glob("*.md")))
# The folder of each example, below the package, and its text.
EXAMPLES: dict[str, str] = {
    folder: re.sub(r"^   ", "", code, flags=re.MULTILINE)
    for folder, code in re.findall(
        r"`toy\.py` in `lyapunov_prune/(\w+/\w+)/`:\n\n   ```python\n(.*?)^   ```", PAGES, re.MULTILINE | re.DOTALL
    )
}
COMMANDS = {
    folder: line.split()
    for folder, line in {
        "ranking/criteria": "rank tiny --criterion toy --remove 1 --tokens 128 --context 64",
        "compression/methods": "compress tiny --method toy --sparsity 0.5 --format toy -o method",
        "allocation/schedules": "compress tiny --allocation toy --method svd --sparsity 0.5 -o schedule",
        "merging/reductions": "joint tiny --reduction toy --remove 2 --tokens 800 --context 32 -o joint",
        "sensitivity/studies": "sensitivity tiny --study toy --tokens 128 --context 64 -o study",
        "export/formats": "export tiny --format toy -o format",
        "models/readers": "profile rows --device disk --tokens 128 --context 64 -o reader",
    }.items()
}
# Every command in one process.
SCRIPT = """
import json, os, sys
sys.path.insert(0, os.environ["CHANGED"])
from lyapunov_prune.cli.app import main
from lyapunov_prune.cli.commands import joint
from lyapunov_prune.joint import search
joint.STEPS = joint.LAST_STEPS = 1
search._selection_error = lambda *_: 0.0  # a random model has no pair that selection could tell from another
for sys.argv in json.loads(sys.argv[1]):
    try:
        main()
    except SystemExit as end:
        assert not end.code, sys.argv
"""
# What the example of a reader makes of the checkpoints `rows`, in memory and from disk, and of those with a fault.
READ = """
import os, sys
sys.path.insert(0, os.environ["CHANGED"])
import torch
from pathlib import Path
from safetensors.torch import save_file
from lyapunov_prune import LyapunovPruneError, load
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.diagnosis.check_file import check_file
state = {name: W.clone() for name, W in load("rows").model.state_dict().items()}
save_file(state, "memory")
outline = read_outline(Path("rows"), "rows")
for name, W in state.items():
    outline.fill(W.zero_(), name)
save_file(state, "disk")
assert check_file("rows").passed
for way in (lambda: load(sys.argv[1]), lambda: read_outline(Path(sys.argv[1]), "spoilt")):
    try:
        way()
    except LyapunovPruneError:
        print("refused")
"""


def packed_by_rows(folder: Path) -> dict[str, torch.Tensor]:
    """Store the matrices of the layers in `folder` in int8 with a scale a row; returns all as dequantised by hand."""
    stored, plain = load_file(folder / WEIGHTS), {}
    for key in list(stored):
        W = plain[key] = stored[key]
        if ".layers." in key and W.ndim == 2:
            scale = W.abs().amax(1) / 127
            q = stored[key] = (W / scale[:, None]).round().to(torch.int8)
            stored[f"{key}_scale_row"] = scale
            plain[key] = torch.from_numpy(q.numpy() * scale.numpy()[:, None])
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    edit_json(folder / "config.json", quantization_config={"quant_method": "toy"})
    return plain


def row_added(folder: str, root: Path) -> None:
    """A first row in the table of the room."""
    table = root / Path(folder).parent / "table.py"
    package = f"lyapunov_prune.{folder.replace('/', '.')}"
    text, count = re.subn(rf'("{package}",\s*\()', r'\1"toy", ', table.read_text(encoding="utf-8"))
    assert count == 1
    table.write_text(text, encoding="utf-8")


def test_every_table_has_an_example() -> None:
    assert EXAMPLES.keys() == COMMANDS.keys()
    rooms = {path.parent.name for path in PACKAGE.glob("*/table.py")}
    assert {folder.split("/")[0] for folder in EXAMPLES} == rooms


@pytest.mark.parametrize("folder", EXAMPLES)
def test_an_example_is_as_the_linter_wants_it(folder: str) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["check"], ["format", "--check"]):
        place = f"--stdin-filename=lyapunov_prune/{folder}/toy.py"
        done = subprocess.run(
            [ruff, *command, place, "-"], cwd=REPOSITORY, input=EXAMPLES[folder], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment in which the package has every example."""
    root = tmp_path / "changed" / "lyapunov_prune"
    shutil.copytree(PACKAGE, root, ignore=shutil.ignore_patterns("__pycache__"))
    for folder, code in EXAMPLES.items():
        (root / folder / "toy.py").write_text(code, encoding="utf-8")
        row_added(folder, root)
    return {**os.environ, "CHANGED": str(root.parent), "PYTHONPATH": str(root.parent)}


def test_the_examples_run(checkpoint: Path, env: dict[str, str]) -> None:
    packed_by_rows(Path(shutil.copytree(checkpoint, checkpoint.parent / "rows")))
    lines = json.dumps([["lyapunov-prune", *command] for command in COMMANDS.values()])
    ((code, out, told),) = FORKED.run_together(SCRIPT, [env], str(checkpoint.parent), lines)
    assert code == 0, told
    for words in ("by toy", "matrices by toy", "svd, toy: sparsity", "toy: most at layers"):
        assert words in out
    made = checkpoint.parent
    assert json.loads((made / "joint" / "joint.json").read_text())["importance"]["reduction"] == "toy"
    assert {"config.json", "history.json", "weights.npz"} <= {path.name for path in (made / "format").iterdir()}
    assert "float16; 0." in out
    assert "eval format" not in out
    assert json.loads((made / "method" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (made / "reader" / "profile.json").is_file()


def test_a_reader_is_asked_in_memory_and_from_disk(checkpoint: Path, env: dict[str, str]) -> None:
    folder = checkpoint.parent
    plain = packed_by_rows(Path(shutil.copytree(checkpoint, folder / "rows")))
    name = "model.layers.1.mlp.up_proj.weight_scale_row"
    for fault, spoilt in {
        "lost": lambda scale: {},
        "one": lambda scale: {name: scale[:1].clone()},
        "turned": lambda scale: {name: scale[None]},
    }.items():
        shutil.copytree(folder / "rows", folder / fault)
        stored = load_file(folder / fault / WEIGHTS)
        save_file(stored | spoilt(stored.pop(name)), folder / fault / WEIGHTS, {"format": "pt"})
        ((code, out, told),) = FORKED.run_together(READ, [env], str(folder), fault)
        assert (code, out.split()) == (0, ["refused", "refused"]), told
    for way in ("memory", "disk"):
        read = load_file(folder / way)
        assert read.keys() >= plain.keys()
        assert all(torch.equal(read[key], W) for key, W in plain.items())
