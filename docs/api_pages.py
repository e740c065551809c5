"""The API reference: a page a room, from the docstrings, which are Markdown and are shown as such.

An extension of Sphinx. Sources are read and not imported, so the reference needs none of the package's dependencies.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Deeper fences hold shallower ones.
_FENCES = ("`" * 7, "`" * 6)
Definition = ast.FunctionDef | ast.ClassDef


def setup(app: Any) -> None:
    docs = Path(__file__).parent
    app.connect("builder-inited", lambda app: write_pages(docs.parent / "lyapunov_prune", docs / "api"))


def write_pages(package: Path, target: Path) -> None:
    """A page for every room of `package` in the folder `target`, where pages of rooms that are gone are removed."""
    target.mkdir(exist_ok=True)
    rooms = [path for path in package.iterdir() if (path / "__init__.py").is_file()]
    rooms += [path for path in package.glob("*.py") if path.stem != "__init__"]
    pages = {room.stem: "\n".join(_room(room, package)) + "\n" for room in rooms}
    for path in target.glob("*.md"):
        if path.stem not in pages:
            path.unlink()
    for name, text in pages.items():
        path = target / f"{name}.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:  # sphinx goes by the time of change
            path.write_text(text, encoding="utf-8")


def _room(room: Path, package: Path) -> Iterator[str]:
    yield f"# {room.stem}"
    files = sorted(room.rglob("*.py")) if room.is_dir() else [room]
    head = room / "__init__.py"
    if head in files:
        files.remove(head)
        yield from ["", _docstring(ast.parse(head.read_text(encoding="utf-8")))]
    for file in files:
        yield from _module(file, package)


def _module(file: Path, package: Path) -> Iterator[str]:
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    parts = file.relative_to(package.parent).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    yield from ["", f"## {name.removeprefix(f'{package.name}.')}", "", _docstring(tree)]
    yield from ["", f"```{{py:currentmodule}} {name}", "```"]
    _qualify(tree, package.name)
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield from _definition(node, source)


def _qualify(tree: ast.Module, package: str) -> None:
    """Write the package's own classes in annotations with their modules: two rooms may have one of the same name."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {
        name.asname or name.name: f"~{node.module}.{name.name}"  # ~ shows the last part only
        for node in imports
        if (node.module or "").startswith(f"{package}.")
        for name in node.names
        if name.name[0].isupper()
    }
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for part in ast.walk(annotation) if annotation else ():
                if isinstance(part, ast.Name):
                    part.id = modules.get(part.id, part.id)


def _definition(node: Definition, source: str, depth: int = 0) -> Iterator[str]:
    fence = _FENCES[depth]
    if isinstance(node, ast.FunctionDef):
        kind, signature = _function(node, method=depth > 0)
        yield from ["", f"{fence}{{py:{kind}}} {signature}", "", _docstring(node), fence]
        return
    yield from ["", f"{fence}{{py:class}} {node.name}", "", _docstring(node)]
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    if fields:
        lines = source.splitlines()[fields[0].lineno - 1 : fields[-1].end_lineno]  # with what is said beside them
        yield from ["", "```python", *(line.removeprefix("    ") for line in lines), "```"]
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_") and ast.get_docstring(part):
            yield from _definition(part, source, depth + 1)
    yield fence


def _function(node: ast.FunctionDef, method: bool) -> tuple[str, str]:
    """Which directive says it, and its signature on one line."""
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    returns = ast.unparse(node.returns) if node.returns else ""
    if marks & {"property", "cached_property"}:
        return "property", f"{node.name}\n:type: {returns}"
    arguments = node.args
    if method and "staticmethod" not in marks:
        arguments.args = arguments.args[1:]  # self or cls
    signature = f"{node.name}({ast.unparse(arguments)})" + (f" -> {returns}" if returns else "")
    if method and "classmethod" in marks:
        signature += "\n:classmethod:"
    return "method" if method else "function", signature


def _docstring(node: ast.Module | Definition) -> str:
    lines = (ast.get_docstring(node) or "").splitlines()
    return "\n".join(_escaped(line) if line.startswith("|") else line for line in lines)


def _escaped(row: str) -> str:
    """A row of a table, in whose formulas `|` would end a cell."""
    return re.sub(r"`[^`]*`", lambda formula: re.sub(r"(?<!\\)\|", r"\\|", formula[0]), row)
