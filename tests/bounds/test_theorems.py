"""The registry of theorems against the Lean sources, the Python side and lean/README.md."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from lean_sources import code_only, commands, problems_of, signature

from lyapunov_prune.bounds import theorems as registry
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError

REPOSITORY = Path(__file__).resolve().parents[2]
PINS = ("lakefile.lean", "lean-toolchain", "lake-manifest.json")
THEOREMS = registry.theorems()


@pytest.fixture
def lean(tmp_path: Path) -> Path:
    """A copy of the Lean project that a test may spoil."""
    shutil.copytree(REPOSITORY / "lean", tmp_path / "lean")
    (tmp_path / "tools").mkdir()
    shutil.copy(REPOSITORY / "tools" / "lean_sources.py", tmp_path / "tools")
    for name in PINS:
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path / "lean"


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


# The sources say what the registry says.


def test_sources_and_registry_agree() -> None:
    assert registry.source_root() == REPOSITORY / "lean"
    assert problems_of(REPOSITORY / "lean") == []


def test_the_twelve_theorems_are_all_there() -> None:
    assert {t.number for t in THEOREMS if t.number} == {str(n) for n in range(1, 13)}
    assert len({t.name for t in THEOREMS}) == len(THEOREMS)


def test_docstrings_number_the_theorems_as_the_registry_does() -> None:
    for module in {t.module for t in THEOREMS}:
        text = (REPOSITORY / f"lean/LyapunovPrune/{module}.lean").read_text(encoding="utf-8")
        pairs = re.findall(r"/-- \*\*Theorem (\d+)\.?\*\*(?:(?!-/).)*-/\s*theorem (\w+)", text, re.DOTALL)
        numbers = {t.name: t.number for t in THEOREMS}
        assert [(numbers[name], name) for _, name in pairs] == pairs


def test_pins_agree() -> None:
    lakefile, toolchain, manifest = ((REPOSITORY / name).read_text(encoding="utf-8") for name in PINS)
    mathlib = next(p for p in json.loads(manifest)["packages"] if p["name"] == "mathlib")
    assert f'"{mathlib["rev"]}"' in lakefile
    assert toolchain.strip() == "leanprover/lean4:v4.28.0"
    for library in (
        "@[default_target]\nlean_lib LyapunovPrune where",
        "@[test_driver]\nlean_lib LyapunovPruneTest",
    ):
        assert library in lakefile


# Planted faults: each of these must be seen.

FAULTS = {
    "sorry": ("Merging", "  W₂.opNorm_comp_le W₁", "  sorry", "`sorry`"),
    "admit": ("Merging", "  exact W₂.le_opNorm _", "  admit", "`admit`"),
    "native_decide": ("Checker", "  linarith", "  native_decide", "`native_decide`"),
    "axiom": ("Checker", "end LyapunovPrune", "axiom cheat : False\n\nend LyapunovPrune", "`axiom`"),
    "kernel skipped": (
        "Checker",
        "namespace LyapunovPrune",
        "set_option debug.skipKernelTC true\n\nnamespace LyapunovPrune",
        "`skipKernelTC`",
    ),
    "between quoted quotes": (
        "Checker",
        "end LyapunovPrune",
        "#eval '\"' sorry '\"'\n\nend LyapunovPrune",
        "`sorry`",
    ),
    "behind a raw string": (
        "Checker",
        "end LyapunovPrune",
        '#eval r"\\" sorry ""\n\nend LyapunovPrune',
        "`sorry`",
    ),
    "renamed": (
        "Approximation",
        "theorem sparse_activation_bound",
        "theorem sparse_bound",
        "`sparse_activation_bound` is in the registry",
    ),
    "weakened in the signature": (
        "Propagation",
        "(hK₁ : 0 ≤ K₁)\n    (first",
        "(hK₁ : 1 ≤ K₁)\n    (first",
        "`nonlinear_composition_bound`",
    ),
    "weakened in the conclusion": (
        "Contraction",
        "(e' / h') ^ 2 < (e / h) ^ 2 := by",
        "(e' / h') ^ 2 ≤ (e / h) ^ 2 := by",
        "`residual_growth_contraction`",
    ),
    "weakened in a variable": (
        "Approximation",
        "[NormedSpace ℝ F]",
        "[NormedSpace ℝ F] [FiniteDimensional ℝ E]",
        "`retrieval_bound`",
    ),
    "a hypothesis hidden in a variable": (
        "Decision",
        "variable {ι : Type*}",
        "variable {ι : Type*} [IsEmpty ι]",
        "`argmax_unchanged`",
    ),
    "weakened in a definition": (
        "Probability",
        "∑ i, p i * log (p i / q i)",
        "∑ i, p i * log (p i / p i)",
        "`kl_softmax`",
    ),
    "a definition of another meaning": (
        "Propagation",
        "K n * composedBound K δ e₀ n + δ n\n\n@",
        "K n * composedBound K δ e₀ n + 2 * δ n\n\n@",
        "`composedBound_eq_sum`",
    ),
    "a notation of another meaning": (
        "Merging",
        "namespace LyapunovPrune",
        'namespace LyapunovPrune\n\nlocal notation "‖" x "‖" => (0 : ℝ)',
        "`opNorm_merged_le`",
    ),
    "a definition in an imported file": (
        "Contraction",
        "open Finset",
        "open Finset\n\ninstance : Norm ℝ := ⟨fun _ => 0⟩",
        "`preln_layer_contracts`",
    ),
    "unregistered": (
        "Checker",
        "end LyapunovPrune",
        "theorem news : True := trivial\n\nend LyapunovPrune",
        "`news` is not in the registry",
    ),
    "twice": (
        "Checker",
        "end LyapunovPrune",
        "end LyapunovPrune\n\ntheorem no_false_alarm : True := trivial",
        "a second theorem `no_false_alarm`",
    ),
    "buried in another command": (
        "Checker",
        "  linarith\n\n/-- A violation",
        "  linarith\n  variable (absurd : False)\n\n/-- A violation",
        "`variable` does not begin in column 0",
    ),
    "indented at the start": (
        "Merging",
        "import Mathlib.A",
        "  theorem news : True := trivial\nimport Mathlib.A",
        "`news`",
    ),
    "unknown command": (
        "Checker",
        "variable {e e'",
        'macro "done" : tactic => `(tactic| trivial)\n\nvariable {e e\'',
        "unknown command `macro`",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(lean: Path, fault: str) -> None:
    module, old, new, told = FAULTS[fault]
    assert problems_of(lean) == []
    replace(lean / "LyapunovPrune" / f"{module}.lean", old, new)
    problems = problems_of(lean)
    assert any(told in problem for problem in problems), problems


def test_file_left_out_of_the_root_is_seen(lean: Path) -> None:
    replace(lean / "LyapunovPrune.lean", "import LyapunovPrune.Merging\n", "")
    assert problems_of(lean) == ["LyapunovPrune/Merging.lean is not imported by LyapunovPrune.lean"]


def test_theorem_in_the_root_is_seen(lean: Path) -> None:
    with (lean / "LyapunovPrune.lean").open("a", encoding="utf-8") as root:
        root.write("\ntheorem news : True := trivial\n")
    assert problems_of(lean) == ["LyapunovPrune.lean:10: `theorem`; this file only imports"]


def test_file_outside_both_libraries_is_seen(lean: Path) -> None:
    (lean / "Stray.lean").write_text("theorem stray : True := trivial\n", encoding="utf-8")
    assert problems_of(lean) == ["Stray.lean belongs to neither library"]


def test_import_without_a_file_is_seen(lean: Path) -> None:
    (lean / "LyapunovPrune" / "Merging.lean").unlink()
    problems = problems_of(lean)
    assert "LyapunovPrune.lean imports LyapunovPrune.Merging, which has no file" in problems
    assert any("`merged_projection` is in the registry" in problem for problem in problems)


def test_spoilt_test_library_is_seen(lean: Path) -> None:
    tests = lean / "LyapunovPruneTest.lean"
    replace(tests, "import LyapunovPrune\n", "")
    replace(tests, "← liftCoreM (collectAxioms name)", "[]")
    problems = " ".join(problems_of(lean))
    assert "does not import LyapunovPrune" in problems
    assert "collectAxioms" in problems


def test_words_in_comments_strings_and_longer_names_pass(lean: Path) -> None:
    checker = lean / "LyapunovPrune" / "Checker.lean"
    replace(checker, "namespace", '/- sorry /- axiom -/ admit -/ -- sorry "\nnamespace')
    replace(lean / "LyapunovPruneTest.lean", "rests on {ax}", "sorry: rests on {ax}")
    assert problems_of(lean) == []


def test_a_changed_proof_or_comment_changes_no_digest(lean: Path) -> None:
    merging = lean / "LyapunovPrune" / "Merging.lean"
    replace(merging, "  W₂.opNorm_comp_le W₁", "  ContinuousLinearMap.opNorm_comp_le W₂ W₁")
    replace(merging, "/-- Two affine maps", "/-- Reworded: two affine maps")
    replace(merging, "(σ τ : F → F) (a : F) :\n    ", "(σ τ : F → F)\n    (a : F) : ")
    assert problems_of(lean) == []


def test_reading_commands() -> None:
    code = code_only(
        "open A in\n@[simp]\ntheorem f (h : x = (y := 1)) :\n    a = b := by\n  rfl\n/- end -/ -- x\nend A\n"
    )
    first, second = commands(code)
    assert (first.keyword, first.name, first.line) == ("theorem", "f", 1)
    assert signature(first.text) == "open A in @[simp] theorem f (h : x = (y := 1)) : a = b"
    assert (second.keyword, second.name, second.line) == ("end", "A", 7)


# The Python side.


def public_functions(module: Path) -> dict[str, str]:
    """Public functions of a Python file with their docstrings; nothing is imported."""
    nodes = ast.parse(module.read_text(encoding="utf-8")).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in functions if not node.name.startswith("_")}


# Every public function of these checks a theorem.
CHECKERS = tuple(f"lyapunov_prune.bounds.{module}" for module in ("checkers", "choice", "decision"))


def use_problems(entries: tuple[registry.Theorem, ...], parent: Path) -> list[str]:
    """Where the registry and the Python package in `parent` disagree about who rests on a theorem."""
    problems = []
    for theorem in entries:
        for dotted in theorem.used_by:
            module, _, function = dotted.rpartition(".")
            path = parent / f"{module.replace('.', '/')}.py"
            known = public_functions(path) if path.is_file() else {}
            if function not in known:
                problems.append(f"{theorem.name}: {dotted} does not exist")
            elif not re.search(rf"\b{theorem.name}\b", known[function]):
                problems.append(f"{theorem.name}: the docstring of {dotted} does not name it")
    used = {dotted for theorem in entries for dotted in theorem.used_by}
    for module in CHECKERS:
        path = parent / f"{module.replace('.', '/')}.py"
        for name in public_functions(path) if path.is_file() else ():
            if f"{module}.{name}" not in used:
                problems.append(f"{module}.{name} rests on no theorem of the registry")
    return problems


def test_checkers_exist_and_name_their_theorems() -> None:
    assert use_problems(THEOREMS, REPOSITORY) == []


def test_planted_faults_on_the_python_side_are_seen(tmp_path: Path) -> None:
    bounds = tmp_path / "lyapunov_prune" / "bounds" / "checkers.py"
    bounds.parent.mkdir(parents=True)
    bounds.write_text('def check_one():\n    """No theorem."""\n\n\ndef check_two():\n    """`a`."""\n')

    def entry(*used_by: str) -> registry.Theorem:
        return registry.Theorem(None, "a", "Checker", "paper", "statement", "0" * 16, used_by)

    one, two = "lyapunov_prune.bounds.checkers.check_one", "lyapunov_prune.bounds.checkers.check_two"
    assert use_problems((entry(two),), tmp_path) == [f"{one} rests on no theorem of the registry"]
    assert use_problems((entry(one, two),), tmp_path) == [f"a: the docstring of {one} does not name it"]
    assert f"a: {two}x does not exist" in use_problems((entry(two, two + "x"),), tmp_path)


# lean/README.md.


def readme_problems(readme: str, repository: Path) -> list[str]:
    """Where the map in the README and the registry disagree."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in readme.splitlines() if "|" in line]
    table = {row[1].strip("`"): row for row in rows if len(row) == 5 and re.fullmatch(r"`\w+`", row[1])}
    known = {theorem.name: theorem for theorem in THEOREMS}
    problems = [f"{name} is in the table and not in the registry" for name in table.keys() - known.keys()]
    problems += [f"{name} is not in the table" for name in known.keys() - table.keys()]
    for name in table.keys() & known.keys():
        _, _, _, python, tests = table[name]
        used_by, kind = known[name].used_by, known[name].kind
        if python != (", ".join(f"`{dotted}` ({kind})" for dotted in used_by) or "no checker yet"):
            problems.append(f"{name}: the table says {python}, the registry {used_by} {kind}")
        files = re.findall(r"`(tests/\S+\.py)`", tests)
        for file in files:
            if not (repository / file).is_file():
                problems.append(f"{name}: {file} does not exist")
        texts = "".join((repository / f).read_text(encoding="utf-8") for f in files if (repository / f).is_file())
        for dotted in used_by:
            if dotted.rpartition(".")[2] not in texts:
                problems.append(f"{name}: none of {files} tests {dotted}")
    return problems


def test_readme_maps_every_theorem() -> None:
    readme = (REPOSITORY / "lean" / "README.md").read_text(encoding="utf-8")
    assert readme_problems(readme, REPOSITORY) == []


def test_planted_faults_in_the_readme_are_seen() -> None:
    readme = (REPOSITORY / "lean" / "README.md").read_text(encoding="utf-8")
    for old, new, told in (
        ("`no_false_alarm` |", "`no_alarm` |", "no_alarm is in the table and not in the registry"),
        ("`no_false_alarm` |", "`no_alarm` |", "no_false_alarm is not in the table"),
        ("measure_contraction`", "measure`", "the table says"),
        ("(measurement)", "(checker)", "the table says"),
        ("tests/profiles/test_contraction.py", "tests/test_nothing.py", "tests/test_nothing.py does not exist"),
        ("tests/profiles/test_contraction.py", "tests/bounds/test_theorems.py.py", "does not exist"),
    ):
        assert old in readme
        problems = readme_problems(readme.replace(old, new), REPOSITORY)
        assert any(told in problem for problem in problems), (new, problems)


# docs/proofs.md.


def use_rows(document: str) -> dict[str, tuple[str, str]]:
    """Of the table in docs/proofs.md: number and use by name."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*) \|$", document, re.MULTILINE)
    return {name: (number, use) for number, name, use in rows}


def told_use(theorem: registry.Theorem) -> str:
    users = ", ".join(f"`{dotted.removeprefix('lyapunov_prune.')}`" for dotted in theorem.used_by)
    return users or f"no use: {theorem.unused}"


def test_each_of_the_twelve_has_a_use_or_a_reason() -> None:
    for theorem in THEOREMS:
        if theorem.number:
            assert bool(theorem.used_by) != bool(theorem.unused), theorem.name
        assert not theorem.unused.endswith(".")


def test_the_document_says_of_the_twelve_what_the_registry_says() -> None:
    document = (REPOSITORY / "docs" / "proofs.md").read_text(encoding="utf-8")
    assert use_rows(document) == {t.name: (t.number, told_use(t)) for t in THEOREMS if t.number}


@pytest.mark.parametrize("old", ["no use: it compares", "checkers.preln_contraction"])
def test_planted_fault_a_use_that_the_registry_does_not_have_is_seen(old: str) -> None:
    document = (REPOSITORY / "docs" / "proofs.md").read_text(encoding="utf-8")
    assert old in document
    assert use_rows(document.replace(old, "checkers.nothing")) != use_rows(document)


# Whether Lean checked it here.


def fake_lake(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a `lake` on the path that writes down how it was called and then runs `script`."""
    folder.mkdir(exist_ok=True)
    lake = folder / "lake"
    lake.write_text(f'#!/bin/sh\necho "$*" >> calls.txt\n{script}\n', encoding="utf-8")
    lake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_without_lake_nothing_is_verified(lean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(lean))
    assert registry.verification(lean) == registry.Verification(False, "not verified here: lake is not installed")
    with pytest.raises(LyapunovPruneError, match="install elan"):
        registry.verify(lean)


@pytest.mark.parametrize("program", ["lake", "python"])
def test_a_program_that_does_not_run_names_its_own_remedy(
    program: str, lean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = lean.parent / program
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    if program == "python":
        monkeypatch.setattr(registry.sys, "executable", str(broken))
    with pytest.raises(LyapunovPruneError, match=f"cannot run .*{program}") as error:
        registry._run(str(broken), cwd=lean)
    assert ("elan" in str(error.value)) == (program == "lake")


def test_verified_only_after_build_and_test_passed(
    lean: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_lake(lean.parent / "bin", monkeypatch, "echo Build completed successfully")
    assert "run `lyapunov-prune theorems --verify`" in registry.verification(lean).message
    assert registry.verify(lean).verified
    assert (lean.parent / "calls.txt").read_text().splitlines() == ["exe cache get", "build", "test"]
    assert registry.verification(lean).message.startswith("verified here")
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("Build completed successfully") == 3


@pytest.mark.parametrize("failing", ["build", "test"])
def test_failure_leaves_nothing_verified(lean: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    fake_lake(lean.parent / "bin", monkeypatch, "exit 0")
    registry.verify(lean)
    fake_lake(lean.parent / "bin", monkeypatch, f'test "$1" != {failing}')
    with pytest.raises(CheckFailed, match=f"lake {failing}"):
        registry.verify(lean)
    assert not registry.verification(lean).verified


@pytest.mark.parametrize("name", ["LyapunovPrune/Merging.lean", "LyapunovPruneTest.lean", "../lean-toolchain"])
def test_a_changed_source_makes_the_stamp_stale(lean: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake_lake(lean.parent / "bin", monkeypatch, "exit 0")
    registry.verify(lean)
    with (lean / name).open("a", encoding="utf-8") as source:
        source.write("\n-- one more line\n")
    assert "changed since" in registry.verification(lean).message


def test_a_source_changed_while_lake_ran_is_not_verified(lean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lake(lean.parent / "bin", monkeypatch, "echo >> lean/LyapunovPrune/Merging.lean")
    with pytest.raises(CheckFailed, match="while lake ran"):
        registry.verify(lean)
    assert not registry.verification(lean).verified


def test_a_changed_registry_makes_the_stamp_stale(lean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lake(lean.parent / "bin", monkeypatch, "exit 0")
    registry.verify(lean)
    monkeypatch.setattr(registry, "_THEOREMS", THEOREMS[1:])
    assert "registry changed" in registry.verification(lean).message


def test_a_spoilt_source_is_neither_verified_nor_verifiable(
    lean: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_lake(lean.parent / "bin", monkeypatch, "exit 0")
    registry.verify(lean)
    replace(lean / "LyapunovPrune" / "Merging.lean", "  W₂.opNorm_comp_le W₁", "  sorry")
    assert "changed since" in registry.verification(lean).message
    with pytest.raises(CheckFailed, match=r"lean_sources\.py` .*status 1"):
        registry.verify(lean)
    assert "LyapunovPrune/Merging.lean:30: `sorry`" in capfd.readouterr().err
    assert "build" not in (lean.parent / "calls.txt").read_text().splitlines()[3:]
    assert not registry.verification(lean).verified


def test_a_damaged_stamp_is_not_a_verification(lean: Path) -> None:
    stamp = lean.parent / registry.STAMP
    stamp.parent.mkdir()
    for text in ("", "[]", "{}", '{"digest": 1, "toolchain": null}'):
        stamp.write_text(text)
        assert not registry.verification(lean).verified


def test_an_installed_package_has_no_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "lyapunov_prune" / "bounds" / "theorems.py"))
    assert registry.source_root() is None
    assert "clone the repository" in registry.verification().message
    with pytest.raises(LyapunovPruneError, match="clone the repository"):
        registry.verify()
