"""One memory through one layer: hook, view, block, cross-attention, projection, attention; a dozen changes of file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import tiny, tiny_unets
from tests.layer_path import at_layer

LANGUAGE_MODEL = (6, 12)
UNET = (7, 14)


def language_model(prepared: bool, grad: bool) -> list[str]:
    model, ids = tiny.attach(tiny.make("llama"), layers=(1,)), tiny.text(3)
    memory: Any = tiny.memory(3, lengths=[5, 0, 3])
    memory = model.prepare(memory) if prepared else memory
    (hook,) = (hook for hook in model.layers[1]._forward_hooks.values() if type(hook).__module__.startswith("mmattn"))
    return at_layer(model.layers[1], hook, call(lambda: model(ids, memory=memory), grad))


def unet(prepared: bool, grad: bool) -> list[str]:
    model = tiny_unets.attach(tiny_unets.make(), blocks=("mid",))
    (index,) = model.adapters["default"].layers
    memory: Any = tiny.memory(3, lengths=[5, 0, 3])
    memory = model.prepare(memory) if prepared else memory
    attn = model.layer(index)
    (hook,) = (hook for hook in attn._forward_hooks.values() if type(hook).__module__.startswith("mmattn"))
    given = (tiny_unets.picture(), 500, tiny_unets.text())
    return at_layer(attn, hook, call(lambda: model(*given, memory=memory), grad))


def call(work: Callable[[], object], grad: bool) -> Callable[[], object]:
    def run() -> None:
        with torch.set_grad_enabled(grad):
            work()

    return run


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("path", "most"), [(language_model, LANGUAGE_MODEL), (unet, UNET)])
def test_the_path_is_short(path: Callable[[bool, bool], list[str]], most: tuple[int, int], prepared: bool, grad: bool):
    files = path(prepared, grad)
    assert files[0].startswith("hosts") and "core/attention.py" in files, files
    assert len(set(files)) <= most[0] and len(files) - 1 <= most[1], files


def print_paths() -> None:
    for path in (language_model, unet):
        for prepared in (False, True):
            for grad in (False, True):
                files = path(prepared, grad)
                print(f"{path.__name__} {prepared=} {grad=}: {len(set(files))} files, {len(files) - 1} changes", files)
