"""Read the Lean sources without Lean: which theorems they state, and whether anything was tampered with.

    python tools/lean_sources.py

This proves nothing. It sees that the files still say what the registry says they say; whether the proofs
hold is for `lake build` and `lake test`.

A statement is more than its own lines: a hypothesis may sit in a `variable`, the meaning in a `def`, a
notation or an `open`. So the digest of a theorem covers its signature and its whole context, that is
every command before it in its file and in the library files it imports, theorems left out.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lyapunov_prune.bounds.theorems import theorems

LIBRARY, TESTS = "LyapunovPrune", "LyapunovPruneTest"
# What would let a statement through without a proof, or with one that the kernel did not see.
_FORBIDDEN = re.compile(
    r"(?<![\w'])(?:admit|axiom|bv_decide|implemented_by|native_decide|skipKernelTC|sorry|sorryAx)(?![\w'!?])"
)
# Each command begins in column 0 with one of these, or its end cannot be seen without parsing Lean.
_COMMAND = re.compile(
    r"abbrev|attribute|class|def|end|example|import|include|inductive|instance|lemma|namespace|notation|omit|"
    r"open|section|set_option|structure|theorem|universe|variable"
)
_BURIED = re.compile(
    r"(?<![\w'.])(?:theorem|lemma|def|abbrev|instance|variable|namespace|section|notation|macro|syntax|elab)\b"
)
_PROVED = ("theorem", "lemma")
_COMMENT_OR_STRING = re.compile(
    r"""--[^\n]*|/-|\br(#*)".*?"\1|"(?:[^"\\]|\\.)*"|'\\?"'""",  # raw strings and '"' hide no quote
    re.DOTALL,
)

# fmt: off
# Steps of proofs, and facts about the definitions: public in Lean, claimed by nobody.
_HELPERS = frozenset({
    "composedBound_succ", "composedBound_zero", "error_growth_of_sublayer", "error_step",
    "exp_expectation_le", "exp_le_quadratic", "le_composedBound", "softmax_add", "softmax_pos",
    "state_growth_of_alignment", "sum_exp_pos", "sum_mul_exp_eq", "sum_mul_exp_le",
    "sum_mul_sub_expectation", "sum_softmax",
})
# fmt: on

_COMMENT_EDGE = re.compile(r"/-|-/")
_PREFIX = re.compile(r"(?m)(?:\bin|^@\[[^\]]*\])\s*\Z")
_HEAD = re.compile(
    r"\s*(?:(?:open|set_option|omit|include|variable)\b[^\n]*?\bin\s+)*"
    r"(?:@\[[^\]]*\]\s*)*"
    r"(?P<modifiers>(?:(?:local|noncomputable|private|protected|scoped)\s+)*)"
    r"(?P<keyword>\S+)\s*(?P<name>[^\s({\[:]*)"
)


@dataclass(frozen=True)
class Statement:
    """One theorem as a source file states it."""

    name: str
    file: str  # below the source root, with forward slashes
    line: int
    private: bool
    digest: str


@dataclass(frozen=True)
class _Command:
    keyword: str
    name: str
    private: bool
    rest: str  # what follows the keyword
    text: str
    line: int


@dataclass
class _Module:
    file: str
    imports: list[str] = field(default_factory=list)
    context: list[str] = field(default_factory=list)
    theorems: list[tuple[_Command, int]] = field(default_factory=list)  # with the length of its context


def code_only(text: str, strings: bool = True) -> str:
    """The source with comments, and unless `strings` also strings, blanked; lines and columns stay."""
    kept, position = [], 0
    while match := _COMMENT_OR_STRING.search(text, position):
        end = match.end()
        depth = int(match.group() == "/-")
        while depth:  # block comments nest
            edge = _COMMENT_EDGE.search(text, end)
            if edge is None:
                end = len(text)
                break
            depth += 1 if edge.group() == "/-" else -1
            end = edge.end()
        found = text[match.start() : end]
        stays = strings and not found.startswith(("--", "/-"))
        kept += [text[position : match.start()], found if stays else re.sub(r"[^\n]", " ", found)]
        position = end
    return "".join(kept) + text[position:]


def commands(code: str) -> Iterator[_Command]:
    """The commands of a source without comments, in order."""
    parts: list[tuple[int, str]] = []
    line = 1
    for part in re.split(r"(?m)^(?=\S)", code):
        if part.strip():
            if parts and _PREFIX.search(parts[-1][1]):  # `open Finset in`, `@[simp]`: the next line's command
                parts[-1] = (parts[-1][0], parts[-1][1] + part)
            else:
                parts.append((line, part))
        line += part.count("\n")
    for line, text in parts:
        if head := _HEAD.match(text):
            private = "private" in head["modifiers"]
            rest = text[head.end("keyword") :]
            yield _Command(head["keyword"], head["name"], private, rest, " ".join(text.split()), line)


def signature(command: str) -> str:
    """A command up to the `:=` outside of brackets that ends its statement."""
    depth = 0
    for position, character in enumerate(command):
        depth += (character in "([{⟨") - (character in ")]}⟩")
        if depth == 0 and command.startswith(":=", position):
            return command[:position].rstrip()
    return command


def statements(root: Path) -> tuple[list[Statement], list[str]]:
    """Every theorem of the library below `root`, and what kept this reader from being sure of them."""
    modules: dict[str, _Module] = {}
    problems: list[str] = []
    for path in _library_files(root):
        file = path.relative_to(root).as_posix()
        module = modules[_module_name(file)] = _Module(file)
        for command in _commands_of(path):
            if not _COMMAND.fullmatch(command.keyword):
                problems.append(f"{file}:{command.line}: unknown command `{command.keyword}`")
            if buried := _BURIED.search(code_only(command.rest, strings=False)):
                place = f"{file}:{command.line + command.rest.count(chr(10), 0, buried.start())}"
                problems.append(f"{place}: `{buried.group()}` does not begin in column 0")
            if command.keyword in _PROVED:
                module.theorems.append((command, len(module.context)))
            elif command.keyword == "import":
                module.imports.append(command.name)
            elif command.keyword != "example":
                module.context.append(command.text)

    found: list[Statement] = []
    for module in modules.values():
        imported = [text for name in _imported(module, modules) for text in modules[name].context]
        for command, context in module.theorems:
            whole = [*imported, *module.context[:context], signature(command.text)]
            digest = hashlib.sha256("\n".join(whole).encode()).hexdigest()[:16]
            found.append(Statement(command.name, module.file, command.line, command.private, digest))
    return found, problems


def problems_of(root: Path) -> list[str]:
    """What is wrong with the sources below `root`, or where the registry says other; empty when nothing is."""
    return [*_forbidden_words(root), *_import_problems(root), *_statement_problems(root)]


def _statement_problems(root: Path) -> Iterator[str]:
    expected = {t.name: (t.file, t.digest) for t in theorems()}
    found, problems = statements(root)
    yield from problems
    by_name: dict[str, Statement] = {}
    for statement in found:
        place = f"{statement.file}:{statement.line}"
        if statement.name in by_name:
            yield f"{place}: a second theorem `{statement.name}`"
        by_name[statement.name] = statement
        if not statement.private and statement.name not in expected and statement.name not in _HELPERS:
            where = f"the registry (lyapunov_prune/bounds/theorems.csv); its digest is {statement.digest}"
            yield f"{place}: theorem `{statement.name}` is not in {where}"
    for name, (file, digest) in expected.items():
        known = by_name.get(name)
        if known is None or known.file != file:
            yield f"{file}: theorem `{name}` is in the registry and not in this file"
        elif known.digest != digest:
            yield (
                f"{file}:{known.line}: `{name}` or something it rests on (a variable, a definition, an open) "
                f"no longer reads as registered: digest {known.digest}, registered {digest}"
            )
    for name in sorted(_HELPERS - set(by_name)):
        yield f"the helper lemma `{name}` is in no source file"


def _forbidden_words(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.lean")):
        code = code_only(path.read_text(encoding="utf-8"), strings=False)
        for match in _FORBIDDEN.finditer(code):
            line = code.count("\n", 0, match.start()) + 1
            yield f"{path.relative_to(root).as_posix()}:{line}: `{match.group()}`"


def _import_problems(root: Path) -> Iterator[str]:
    library, tests = root / f"{LIBRARY}.lean", root / f"{TESTS}.lean"
    for path in (library, tests):
        if not path.is_file():
            yield f"{path.name} is missing"
    modules = {_module_name(p.relative_to(root).as_posix()): p for p in _library_files(root)}
    for command in _commands_of(library):
        if command.keyword != "import":
            yield f"{library.name}:{command.line}: `{command.keyword}`; this file only imports"
    imported = {name for name in _imports_of(library) if name.split(".")[0] == LIBRARY}
    for name in sorted(set(modules) - imported):
        yield f"{modules[name].relative_to(root).as_posix()} is not imported by {library.name}"
    for name in sorted(imported - set(modules)):
        yield f"{library.name} imports {name}, which has no file"
    for path in sorted(set(root.rglob("*.lean")) - set(modules.values()) - {library, tests}):
        yield f"{path.relative_to(root).as_posix()} belongs to neither library"
    if tests.is_file():
        if LIBRARY not in _imports_of(tests):
            yield f"{tests.name} does not import {LIBRARY}"
        if "collectAxioms" not in code_only(tests.read_text(encoding="utf-8")):
            yield f"{tests.name} no longer asks which axioms the theorems rest on (collectAxioms)"


def _commands_of(path: Path) -> list[_Command]:
    return list(commands(code_only(path.read_text(encoding="utf-8")))) if path.is_file() else []


def _imports_of(path: Path) -> list[str]:
    return [command.name for command in _commands_of(path) if command.keyword == "import"]


def _imported(module: _Module, modules: Mapping[str, _Module]) -> list[str]:
    """Names of the library modules that `module` imports, directly or not, in a fixed order."""
    seen: set[str] = set()
    waiting = list(module.imports)
    while waiting:
        name = waiting.pop()
        if name in modules and name not in seen:
            seen.add(name)
            waiting += modules[name].imports
    return sorted(seen)


def _library_files(root: Path) -> list[Path]:
    return sorted((root / LIBRARY).rglob("*.lean"))


def _module_name(file: str) -> str:
    return file.removesuffix(".lean").replace("/", ".")


if __name__ == "__main__":
    sys.exit("\n".join(problems_of(Path(__file__).resolve().parents[1] / "lean")) or 0)
