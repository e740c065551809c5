"""The theorems of `lean/`: their statements, the functions that use them, and whether Lean verified them here.

In a checkout, `tools/lean_sources.py` compares this registry with the Lean sources, in the tests and before lake runs.
An installed package has neither and lists the claims. A row of `theorems.csv` is a theorem over the real numbers. A
function that computes in floating point proves nothing, however often it passes.
"""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lyapunov_prune.errors import CheckFailed, LyapunovPruneError, reported
from lyapunov_prune.results.files import write_whole

STAMP = Path(".lake") / "lyapunov_prune_verified.json"
_VERIFY = "lyapunov-prune theorems --verify"


@dataclass(frozen=True)
class Theorem:
    """One row of `theorems.csv`.

    `digest` covers the signature and everything it depends on (`tools/lean_sources.py` prints the new one after an
    intended change).
    """

    number: str | None  # in the structural sensitivity paper; None beyond its twelve
    name: str  # in the Lean namespace LyapunovPrune
    module: str
    paper: str
    statement: str
    digest: str
    used_by: tuple[str, ...] = ()  # Python functions whose docstrings name this theorem
    unused: str = ""  # why no function uses it, for the paper's twelve

    @property
    def file(self) -> str:
        return f"LyapunovPrune/{self.module}.lean"

    @property
    def kind(self) -> str:
        """What kind of function uses it: a "checker" or a "measurement"; empty without functions."""
        measured = any(name.startswith("lyapunov_prune.profiles.") for name in self.used_by)
        return "measurement" if measured else "checker" if self.used_by else ""


@dataclass(frozen=True)
class Verification:
    """Whether Lean verified the sources on this machine, and how that is known."""

    verified: bool
    message: str


def theorems() -> tuple[Theorem, ...]:
    """Every theorem that the project claims, in the order of the papers."""
    return _THEOREMS


def source_root() -> Path | None:
    """The folder `lean/` of this checkout; None for an installed package."""
    repository = Path(__file__).resolve().parents[2]
    return repository / "lean" if (repository / "lakefile.lean").is_file() else None


def verification(root: Path | None = None) -> Verification:
    """What is known on this machine about the sources in `root` (default: this checkout's)."""
    root = root or source_root()
    if root is None:
        return _not_verified("the Lean sources are not part of an installed package; clone the repository")
    try:
        stamp = json.loads((root.parent / STAMP).read_text(encoding="utf-8"))
        known, toolchain = stamp["digest"], stamp["toolchain"]
    except FileNotFoundError:
        return _not_verified("lake is not installed" if shutil.which("lake") is None else f"run `{_VERIFY}`")
    except (OSError, ValueError, TypeError, KeyError):
        return _not_verified(f"{root.parent / STAMP} is damaged; run `{_VERIFY}`")
    if known != sources_digest(root):
        return _not_verified(f"the sources or the registry changed since Lean last checked them; run `{_VERIFY}`")
    return Verification(True, f"verified here: `lake build` and `lake test` passed with {toolchain}")


def verify(root: Path | None = None) -> Verification:
    """Check the registry against the sources, fetch Mathlib's build files, run `lake build` and `lake test`.

    Records success. The first run downloads gigabytes, see lean/README.md. Raises LyapunovPruneError when this cannot
    run, and CheckFailed when the registry does not match or lake fails.
    """
    root, lake = root or source_root(), shutil.which("lake")
    if root is None or lake is None:
        what = "the Lean sources are not part of an installed package; clone the repository"
        raise LyapunovPruneError(what if root is None else "lake is not installed; install elan (lean/README.md)")
    repository, before = root.parent, sources_digest(root)
    (repository / STAMP).unlink(missing_ok=True)
    _run(sys.executable, "tools/lean_sources.py", cwd=repository)
    for arguments in (["exe", "cache", "get"], ["build"], ["test"]):
        _run(lake, *arguments, cwd=repository)
    if sources_digest(root) != before:
        raise CheckFailed("the Lean sources changed while lake ran; run it again")
    toolchain = (repository / "lean-toolchain").read_text(encoding="utf-8").strip()
    write_whole(repository / STAMP, json.dumps({"digest": before, "toolchain": toolchain}) + "\n")
    return verification(root)


def sources_digest(root: Path) -> str:
    """SHA-256 over the sources, the lakefile, the Lean and Mathlib pins, and the registry."""
    pins = [root.parent / name for name in ("lakefile.lean", "lean-toolchain", "lake-manifest.json")]
    digest = hashlib.sha256(repr([(t.name, t.file, t.digest) for t in _THEOREMS]).encode())
    for path in [*pins, *sorted(root.rglob("*.lean"))]:
        name = path.relative_to(root.parent).as_posix().encode()
        data = path.read_bytes() if path.is_file() else b""
        digest.update(b"%d %d %s %s" % (len(name), len(data), name, data))
    return digest.hexdigest()


def _not_verified(why: str) -> Verification:
    return Verification(False, f"not verified here: {why}")


def _run(program: str, *arguments: str, cwd: Path) -> None:
    remedy = "run this command by another Python" if program == sys.executable else "reinstall elan"
    with reported(f"cannot run {program}", remedy):
        # To stderr, because stdout may carry JSON.
        status = subprocess.run([program, *arguments], cwd=cwd, stdout=2, check=False).returncode
    if status != 0:
        command = " ".join([Path(program).name, *arguments])
        raise CheckFailed(f"`{command}` ended with status {status}; its output says why")


def _read() -> tuple[Theorem, ...]:
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Theorem(number=row.pop("number") or None, used_by=tuple(row.pop("used_by").split()), **row)
            for row in csv.DictReader(file)
        )


_THEOREMS = _read()
