"""The page of invariants and the tests agree: every promise has tests, and every number said in a test is a promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "invariants.md"


def numbers(text: str) -> set[int]:
    """The numbers that follow "Invariant" in a text."""
    lists = re.findall(r"\bInvariants? (\d+(?:, \d+)*)", text)
    return {int(number) for found in lists for number in found.split(", ")}


def in_docstrings(source: str) -> set[int]:
    """The numbers in the docstrings of the tests of a file."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {n for node in nodes if node.name.startswith("test_") for n in numbers(ast.get_docstring(node) or "")}


def test_every_promise_has_a_test_and_every_number_is_a_promise() -> None:
    promises = [int(number) for number in re.findall(r"^(\d+)\. ", PAGE.read_text(encoding="utf-8"), re.M)]
    assert promises == sorted(set(promises)) and promises
    held: set[int] = set()
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        source = path.read_text(encoding="utf-8")
        said = in_docstrings(source)
        assert path == Path(__file__).resolve() or numbers(source) <= said, f"{path}: say it in the docstring of a test"
        held |= said
    assert set(promises) - held == set(), "promises without a test"
    assert held - set(promises) == set(), "numbers that are no promise"
