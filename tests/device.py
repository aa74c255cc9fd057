"""A device whose values cannot be read without waiting, on the CPU; and the operations and waits that it would pay."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mmattn

#: Beginnings of the names of operations that launch no kernel.
VIEWS = (
    "view", "reshape", "transpose", "expand", "slice", "unsqueeze", "squeeze", "detach", "t.", "alias", "permute",
    "select", "split", "chunk", "_unsafe_view", "as_strided", "unbind", "lift_fresh", "result_type", "promote_types",
)  # fmt: skip
#: And of those that return a value to Python, or tensors of a size that depends on values.
WAITS = ("_local_scalar_dense", "nonzero", "equal", "unique", "is_nonzero")
PACKAGE = str(Path(mmattn.__file__).parent)


def act_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the package treat tensors of the CPU as those of a device: no value is looked at."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mmattn") and hasattr(module, "may_read"):
            monkeypatch.setattr(module, "may_read", lambda tensor: False)


class Counter(TorchDispatchMode):
    """The operations of a block that launch a kernel, and the lines of the package that wait for values."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name.startswith(WAITS):
            lines = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
            self.waits.append(" <- ".join(f"{line.filename[len(PACKAGE) :]}:{line.lineno}" for line in lines[:-4:-1]))
        elif not name.startswith(VIEWS):
            self.operations += 1
        return function(*args, **(kwargs or {}))


def count(work: Callable[[], object]) -> Counter:
    """Count a call that is made for the second time."""
    work()
    with Counter() as counter:
        work()
    return counter


@torch.no_grad()
def beyond(ours: Callable[[], object], bare: Callable[[], object]) -> int:
    """The operations of a call beyond those of the bare one, which does not wait less."""
    found, less = count(ours), count(bare)
    assert len(found.waits) <= len(less.waits), found.waits
    return found.operations - less.operations
