"""Docstrings keep to their form: one argument and one exception per entry, and each of them is a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.style.docstrings import faults, sections

PACKAGE = Path(__file__).resolve().parents[2] / "mmattn"

GOOD = '''
from dataclasses import dataclass


class OwnError(ValueError):
    """An error of the package."""


@dataclass
class Settings:
    """Settings of a layer.

    Args:
        width: d, a number: any.
        scale: of the scores.
    """

    width: int
    scale: float = 1.0


class Layer(Settings):
    """A layer.

    Args:
        width: d.

    Attributes:
        kind: of layer.
    """

    def __call__(self, x: object, *more: object, mask: object = None, **options: object) -> object:
        """The output of the layer.

        Args:
            x: (b, l, d).
                Of any dtype. Note: of any device.
            *more: further inputs.
            mask: (b, m).
            **options: passed on.

        Raises:
            OwnError: `x` has another width.
            OSError: the disk is full.

        >>> 1
        1
        """


def _private(a: int) -> None:
    """Not looked at.

    Args:
        b: none.
    """
'''


def test_docstrings_of_the_package() -> None:
    assert faults(PACKAGE) == []


def check(folder: Path, text: str, exempt: tuple[str, ...] = ()) -> list[str]:
    (folder / "layers.py").write_text(text)
    return faults(folder, exempt)


def test_sections() -> None:
    found = sections("First.\n\nArgs:\n    a: one\n        more\n\n    b: two\nReturns:\n    c\n\nText\n    d: none\n")
    assert found == {"Args": ["a: one", "    more", "", "b: two"], "Returns": ["c"]}


def test_a_good_module_passes(tmp_path: Path) -> None:
    assert check(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (
            "            mask: (b, m).\n",
            "            masks: (b, m).\n",
            "layers.Layer.__call__: Args has 'masks', which is",
        ),
        ("x: (b, l, d).", "x: (b, l, d). mask: (b, m).", "several arguments in one entry"),
        ("x: (b, l, d).", "x, mask: (b, l, d).", "a line that is no entry"),
        ("            mask: (b, m).\n", "            x: (b, m).\n", "has 'x' twice"),
        ("        scale: of", "        scales: of", "layers.Settings: Args has 'scales', which is no parameter"),
        ("another width.", "another width. OSError: none.", "several exceptions in one entry"),
        ("OwnError: `x`", "OwnErorr: `x`", "'OwnErorr', which is no exception"),
        ("def _private", "def private", "layers.private: Args has 'b', which is no parameter"),
    ],
)
def test_a_fault_is_seen(tmp_path: Path, before: str, after: str, fault: str) -> None:
    assert GOOD.count(before) == 1
    (found,) = check(tmp_path, GOOD.replace(before, after))
    assert fault in found
    assert check(tmp_path, GOOD.replace(before, after), ("layers",)) == []
