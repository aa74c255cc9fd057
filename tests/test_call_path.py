"""The way of one call inside the package, counted in frames: calls, files and changes of file, each with a budget."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import mmattn
from tests import tiny, tiny_unets

PACKAGE = f"{Path(mmattn.__file__).parent}/"


class Way(NamedTuple):
    """Functions of the package that were called, files they are in, and changes from one file to another."""

    calls: int
    files: int
    changes: int


def way(work: Callable[[], object]) -> Way:
    """Count the frames of the package while `work` runs."""
    stack: list[str | None] = []
    path: list[str] = []
    calls = 0

    def note() -> None:
        inside = next((file for file in reversed(stack) if file is not None), None)
        if inside is not None and path[-1:] != [inside]:
            path.append(inside)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call":
            file = frame.f_code.co_filename
            # Once another test has imported peft, torch calls this whenever transformers slices a list of layers.
            inside = file.startswith(PACKAGE) and frame.f_code.co_name not in ("on_registration", "_is_of_peft")
            stack.append(file if inside else None)
            calls += stack[-1] is not None
            note()
        elif event == "return" and stack:
            stack.pop()
            note()

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Way(calls, len(set(path)), max(0, len(path) - 1))


def prepared_call(layers: tuple[int, ...]) -> Callable[[], object]:
    model, ids = tiny.attach(tiny.make("llama"), layers=layers), tiny.text(3)
    memory = model.prepare(tiny.memory(3, lengths=[5, 0, 3]))
    for _ in range(2):
        model(ids, memory=memory)
    return lambda: model(ids, memory=memory)


@torch.no_grad()
def test_a_cached_call():
    """`memory=` to the softmax and back, with one adapted layer; each further layer is the layer alone."""
    one, two = way(prepared_call((1,))), way(prepared_call((1, 2)))
    assert one.calls <= 66 and one.files <= 12 and one.changes <= 44, one
    assert two.files == one.files and two.changes - one.changes <= 25, (one, two)


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_with_a_new_memory(grad: bool):
    """As users write it, and as training makes it: the memory is checked, read and projected on the way."""
    model, ids = tiny.attach(tiny.make("llama"), layers=(1,)), tiny.text(3)
    memories = [tiny.memory(3, lengths=[5, 0, 3], seed=seed) for seed in range(3)]
    with torch.set_grad_enabled(grad):
        for memory in memories[:2]:
            model(ids, memory=memory)
        new = way(lambda: model(ids, memory=memories[2]))
    assert new.calls <= 136 and new.files <= 16 and new.changes <= 106, new


@torch.no_grad()
def test_each_further_token():
    model, ids = tiny.attach(tiny.make("llama"), layers=(1,)), tiny.text(3)
    memory = model.prepare(tiny.memory(3, lengths=[5, 0, 3]))

    def write(count: int) -> Callable[[], object]:
        return lambda: model.generate(ids, memory=memory, max_new_tokens=count, do_sample=False, pad_token_id=0)

    write(2)()
    few, many = way(write(1)), way(write(9))
    assert (many.changes - few.changes) / 8 <= 30, (few, many)


@torch.no_grad()
def test_a_call_without_a_memory():
    model, ids = tiny.attach(tiny.make("llama"), layers=(1,)), tiny.text(3)
    model(ids)
    without = way(lambda: model(ids))
    assert without.files <= 5 and without.changes <= 20, without


@pytest.mark.parametrize("grad", [False, True])
def test_a_layer_of_a_unet(grad: bool):
    """The hook of one attention layer: a dozen changes of file from there to the softmax."""
    model = tiny_unets.attach(tiny_unets.make(), blocks=("mid",))
    (index,) = model.adapters["default"].layers
    attention = model.layer(index)
    ((key, hook),) = ((key, hook) for key, hook in attention._forward_hooks.items() if isinstance(hook, partial))
    ways: list[Way] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        outputs = []
        ways.append(way(lambda: outputs.append(hook(*args, **kwargs))))
        return outputs[0]

    attention._forward_hooks[key] = watched
    with torch.set_grad_enabled(grad):
        model(tiny_unets.picture(), 500, tiny_unets.text(), memory=tiny.memory(3, lengths=[5, 0, 3]))
    assert ways[0].files <= 7 and ways[0].changes <= 14, ways
