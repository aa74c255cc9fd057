"""The way of a memory through one layer of a host, counted in frames of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import mmattn

PACKAGE = Path(mmattn.__file__).parent


def files_visited(work: Callable[[], object]) -> list[str]:
    """The files whose frames run while `work` does, in order: one entry for each change of file."""
    stack: list[str | None] = []
    path: list[str] = []

    def note() -> None:
        inside = next((file for file in reversed(stack) if file is not None), None)
        if inside is not None and path[-1:] != [inside]:
            path.append(inside)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            file = Path(frame.f_code.co_filename)
            stack.append(str(file.relative_to(PACKAGE)) if file.is_relative_to(PACKAGE) else None)
            note()
        elif event == "return" and stack:
            stack.pop()
            note()

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return path


def at_layer(module: Any, hook: Any, call: Callable[[], object]) -> list[str]:
    """The files visited by one hook of a layer, while `call` calls the whole host."""
    paths: list[list[str]] = []
    own = type(hook).__call__

    class Watched(type(hook)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            found = []
            paths.append(files_visited(lambda: found.append(own(self, *args, **kwargs))))
            return found[0]

    plain = type(hook)
    hook.__class__ = Watched
    try:
        call()
    finally:
        hook.__class__ = plain
    (path,) = paths
    return path


if __name__ == "__main__":
    from tests import test_layer_path

    test_layer_path.print_paths()
