"""tools/mutants.py: what it draws, and that a planted fault lives or dies by the tests."""

from pathlib import Path

import mutants
import pytest

MODULE = Path("lyapunov_prune/sums/add.py")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / MODULE).parent.mkdir(parents=True)
    (tmp_path / MODULE).write_text("def add(x, y):\n    return x + y\n\n\ndef unused(x):\n    return x * 2\n")
    (tmp_path / "tests" / "sums").mkdir(parents=True)
    (tmp_path / "tests" / "sums" / "test_add.py").write_text(
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('add', {str(tmp_path / MODULE)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n\n\n"
        "def test_it():\n    assert module.add(2, 3) == 5\n"
    )
    return tmp_path


def test_a_fault_dies_where_a_test_sees_it_and_leaves_nothing(package: Path) -> None:
    before = (package / MODULE).read_text()
    every = mutants.of_room(package, "sums")
    seen, unseen = (next(m for m in every if name in m.operator) for name in ("Add_Sub", "Mul_Sub"))
    tried = mutants.plant(seen, package)
    assert (tried.before, tried.after, tried.died) == ("return x + y", "return x - y", True)
    assert tried.by == "tests/sums/test_add.py::test_it"
    lived = mutants.plant(unseen, package)
    assert (lived.died, lived.by) == (False, "")
    assert (package / MODULE).read_text() == before


def test_the_same_faults_are_drawn_again_and_one_of_a_line(package: Path) -> None:
    every = mutants.of_room(package, "sums")
    assert mutants.drawn(every, 2, "0 sums") == mutants.drawn(every, 2, "0 sums")
    assert sorted(m.line for m in mutants.drawn(every, 9, "0 sums")) == [2, 6]


def test_what_changes_no_number_is_not_drawn(package: Path) -> None:
    wording = (
        "from dataclasses import dataclass\n\nKind = int | str\n\n\n"
        "@dataclass(frozen=True)\nclass Pair:\n    x: int | None\n\n\n"
        "def shown(pair: Pair | None, texts: list[str]) -> str | None:\n"
        "    pairs = zip(texts, texts, strict=True)\n"
        '    also = f"{len(texts) - 1}" if texts else ""\n'
        '    raise ValueError(also + f"{pair}, {pairs}")\n'
    )
    (package / MODULE).write_text(wording)
    assert mutants.of_room(package, "sums") == []
    (package / MODULE).write_text(
        "def add(x: int = 2, /, *, sure=True, **kept):\n    y: int | None = 1 + x\n    return {y} | {x == 1}\n"
    )
    found = mutants.of_room(package, "sums")
    assert {"NumberReplacer", "ReplaceTrueWithFalse", "ReplaceBinaryOperator_Add_Sub"} <= {
        m.operator[5:] for m in found
    }
    assert {"ReplaceBinaryOperator_BitOr_Sub", "ReplaceComparisonOperator_Eq_NotEq"} <= {m.operator[5:] for m in found}
    assert not any(sign in m.operator for m in found for sign in ("_Mul_", "_Div_", "_Pow_"))
    assert "ReplaceComparisonOperator_Eq_Is" not in {m.operator[5:] for m in found}


def test_a_fault_among_what_is_left_out_is_the_one_that_is_planted(package: Path) -> None:
    """Its number counts those that are left out as well."""
    (package / MODULE).write_text(
        'def add(x, y):\n    if y is None:\n        raise ValueError("a" + "b")\n    return x + y\n'
    )
    (fault,) = (m for m in mutants.of_room(package, "sums") if "Add_Sub" in m.operator)
    assert mutants.plant(fault, package).after == "return x - y"


def test_what_its_room_lets_live_is_tried_on_the_tests_of_others(package: Path) -> None:
    (package / "tests" / "others").mkdir()
    other = package / "tests" / "others" / "test_uses.py"
    seen_by = (package / "tests" / "sums" / "test_add.py").read_text()
    other.write_text(f"# of lyapunov_prune.sums.add\n{seen_by}\n\ndef test_more():\n    assert module.unused(3) == 6\n")
    fault = next(m for m in mutants.of_room(package, "sums") if "Mul_Sub" in m.operator)
    assert mutants.tests_of(fault, package)[1] == ["tests/others/test_uses.py", "-m", "not slow"]
    assert mutants.plant(fault, package).died
    other.write_text(seen_by)
    assert not mutants.plant(fault, package).died
    # No test names it: those of a module that imports it stand in.
    (package / "tests" / "sums" / "test_add.py").rename(package / "tests" / "sums" / "test_others.py")
    (package / "lyapunov_prune" / "others").mkdir()
    (package / "lyapunov_prune" / "others" / "uses.py").write_text("import lyapunov_prune.sums.add\n")
    (package / "lyapunov_prune" / "sums" / "more.py").write_text("import lyapunov_prune.sums.add\n")  # has no tests
    assert mutants.tests_of(fault, package)[0] == ["tests/sums"]
    assert mutants.tests_of(fault, package)[1] == ["tests/others/test_uses.py", "-m", "not slow"]


def test_the_committed_survivors_have_all_been_looked_at() -> None:
    """Each is harmless, with the reason, or a test was written for it; and no reason is of one that died."""
    _, tried = mutants.read()
    lived = {t.said: t for t in tried if not t.died}
    harmless = mutants.harmless()
    assert set(harmless) <= set(lived)
    assert [said for said, t in lived.items() if said not in harmless and not t.died_since] == []


def test_the_score_counts_what_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of = [mutants.Mutant("lyapunov_prune/data/text.py", "o", i, i) for i in range(4)]
    fates = [(True, False), (True, False), (False, False), (False, True)]
    tried = [mutants.Tried(m, f"{m.line}", "x", *fate) for m, fate in zip(of, fates, strict=True)]
    monkeypatch.setattr(mutants, "read", lambda: ({"commit": "c" * 40, "seed": 0}, tried))
    monkeypatch.setattr(mutants, "harmless", lambda: {tried[2].said: "a bound that is never reached"})
    found = mutants.written()
    row = next(line for line in found["score"].splitlines() if line.startswith("| all"))
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["4", "1", "2"]
    assert "66.7 %" in row
    assert row.endswith("| 1 | 0 |")
    assert "a bound that is never reached" in found["survivors"]
    assert "a test was written" in found["survivors"]
