"""The exception classes: each of a standard kind, all of them public."""

from __future__ import annotations

import builtins
import inspect

import pytest

from mmattn import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__
}


def test_all_are_public() -> None:
    assert sorted(CLASSES) == sorted(errors.__all__)


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"MmattnError"}))
def test_each_is_of_a_standard_kind(name: str) -> None:
    ours, standard = CLASSES[name].__bases__
    assert ours is errors.MmattnError and getattr(builtins, standard.__name__) is standard
    assert CLASSES[name].__doc__
    with pytest.raises(standard, match="said plainly"):
        raise CLASSES[name]("said plainly")
