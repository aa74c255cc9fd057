"""Read the docstrings of a package from its source, and say which do not keep to their form."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
_ENTRY = re.compile(r"\*{0,2}(?P<name>\w+): \S")
_EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Iteration|Exit)\b(?=[:,]? )")
_BUILTIN = {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def faults(package: Path) -> list[str]:
    """What is wrong in the docstrings of public classes, functions and methods, as `module.name: fault`."""
    trees = {_module(package, path): ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = []
    for module, tree in sorted(trees.items()):
        for name, node in _public(tree):
            found += [f"{module}.{name}: {fault}" for fault in _faults(node, classes)]
    return found


def sections(docstring: str) -> dict[str, list[str]]:
    """The lines of each section of a docstring, without their common indentation."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in docstring.splitlines():
        if line.removesuffix(":") in SECTIONS and line.endswith(":"):
            lines = found.setdefault(line.removesuffix(":"), [])
        elif line and not line.startswith(" "):
            lines = None
        elif lines is not None:
            lines.append(line)
    return {name: textwrap.dedent("\n".join(lines)).strip("\n").splitlines() for name, lines in found.items()}


def _faults(node: Definition, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    given = sections(ast.get_docstring(node) or "")
    parameters = _parameters(node, classes)
    for section in ("Args", "Attributes", "Raises"):
        names: list[str] = []
        for line, entry in _entries(given.get(section, [])):
            match = _ENTRY.match(line)
            if not match:
                yield f"{section} has a line that is no entry `name: text`: {line!r}"
                continue
            name = match["name"]
            if name in names and section != "Raises":
                yield f"{section} has {name!r} twice"
            names.append(name)
            if section == "Args" and name not in parameters:
                yield f"Args has {name!r}, which is no parameter"
            if section == "Args":
                inner = re.findall(r"[.;] (\w+(?:, \w+)*): ", entry)
                if any(word in parameters for words in inner for word in words.split(", ")):
                    yield f"Args has several arguments in one entry: {entry[:60]!r}"
            if section == "Raises":
                if name not in _BUILTIN and not _is_exception(name, classes):
                    yield f"Raises has {name!r}, which is no exception"
                if _EXCEPTION.search(entry.removeprefix(f"{name}: ")):
                    yield f"Raises has several exceptions in one entry: {entry[:60]!r}"


def _entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The first line of each entry of a section, and all its text."""
    entries: list[list[str]] = []
    for line in lines:
        if line.startswith(" ") and entries:
            entries[-1].append(line.strip())
        elif line:
            entries.append([line])
    for entry in entries:
        yield entry[0], " ".join(entry)


def _public(tree: ast.Module | ast.ClassDef, before: str = "") -> Iterator[tuple[str, Definition]]:
    for node in tree.body:
        if not isinstance(node, Definition):
            continue
        if node.name.startswith("_") and node.name not in ("__init__", "__call__"):
            continue
        yield f"{before}{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from _public(node, f"{before}{node.name}.")


def _parameters(node: Definition, classes: dict[str, ast.ClassDef]) -> set[str]:
    if not isinstance(node, ast.ClassDef):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        return {argument.arg for argument in every if argument is not None} - {"self", "cls"}
    found: set[str] = set()
    for owner in _family(node, classes):
        made = [item for item in owner.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if made:
            return found | _parameters(made[0], classes)
        fields = [item.target for item in owner.body if isinstance(item, ast.AnnAssign)]
        found |= {field.id for field in fields if isinstance(field, ast.Name)}
    return found


def _family(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """A class and those it derives from in this package."""
    yield node
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        if name in classes and classes[name] is not node:
            yield from _family(classes[name], classes)


def _is_exception(name: str, classes: dict[str, ast.ClassDef]) -> bool:
    bases = (base for owner in _family(classes[name], classes) for base in owner.bases) if name in classes else ()
    return any(isinstance(base, ast.Name) and base.id in _BUILTIN for base in bases)


def _module(package: Path, path: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
