"""The page of invariants and the tests agree: every promise has tests, and every number said in a test is a promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "invariants.md"


def promises(page: str) -> dict[int, list[str]]:
    """The tests that each numbered promise of a page names."""
    found: dict[int, list[str]] = {}
    for line in page.splitlines():
        if begun := re.match(r"(\d+)\. ", line):
            assert int(begun[1]) > max(found, default=0), f"promise {begun[1]} follows promise {max(found)}"
            found[int(begun[1])] = []
        elif named := re.fullmatch(r" +- `(\S+)`", line):
            found[max(found)].append(named[1])
    return found


def functions_of(path: Path) -> set[str]:
    """The functions of a file, those of classes as Class::function."""
    names = set()
    for part in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(part, ast.ClassDef):
            names |= {f"{part.name}::{inner.name}" for inner in part.body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(part, ast.FunctionDef):
            names.add(part.name)
    return {name for name in names if name.split("::")[-1].startswith("test_")}


def said_in(source: str) -> set[int]:
    """The numbers that a source says after "Invariant"."""
    lists = re.findall(r"\bInvariants? (\d+(?:, \d+)*)", source)
    return {int(number) for numbers in lists for number in numbers.split(", ")}


@pytest.mark.parametrize(("number", "names"), promises(PAGE.read_text(encoding="utf-8")).items())
def test_a_promise_names_tests_that_there_are(number: int, names: list[str]) -> None:
    assert names, "no test holds it"
    for name in names:
        path, test = name.split("::", 1)
        assert (ROOT / path).is_file() and test in functions_of(ROOT / path), name


def test_a_number_in_a_test_is_a_promise_that_names_its_file() -> None:
    files = {number: {name.split("::")[0] for name in names} for number, names in promises(PAGE.read_text()).items()}
    said = 0
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        if path != Path(__file__).resolve():
            where = path.relative_to(ROOT).as_posix()
            for number in said_in(path.read_text(encoding="utf-8")):
                said += 1
                assert where in files.get(number, set()), f"{where} says Invariant {number}, and the page does not"
    assert said > 50
