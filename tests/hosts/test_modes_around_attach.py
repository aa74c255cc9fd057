"""Adapters that are put on a host inside a mode of torch: as outside of it, or refused in words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights

import mmattn
from mmattn.adapters import InsertedAdapter, JoinedAdapter
from mmattn.errors import ConditionError
from tests import tiny, tiny_unets


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float16 by default": lambda: default_dtype(torch.float16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "device meta": lambda: torch.device("meta"),
    "init_empty_weights with buffers": lambda: init_empty_weights(include_buffers=True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
KINDS: dict[str, Callable[[], Any]] = {
    "gated": lambda: mmattn.GatedAdapter(memory_dim=13, every=1, num_heads=2),
    "resampler": lambda: mmattn.GatedAdapter(memory_dim=13, every=2, num_heads=2, resampler={"num_latents": 3}),
    "joined": lambda: JoinedAdapter(memory_dim=13, every=1),
    "inserted": lambda: InsertedAdapter(memory_dim=13),
}


COPIED: dict[str, Any] = {"start": "host", "memory_dim": tiny_unets.TEXT_DIM}


def check_dtype(model: Any, mode: str) -> None:
    dtype = torch.float64 if mode == "float64 by default" else torch.float32
    weights = [*model.adapters.parameters(), *model.adapters.buffers()]
    assert {one.dtype for one in weights if one.is_floating_point()} == {dtype}
    assert {one.device.type for one in weights} == {"cpu"} and not any(one.is_inference() for one in weights)


def check_trains(model: Any) -> None:
    ids = tiny.text(2)
    model(ids, memory=tiny.memory(2), labels=ids).loss.backward()
    gradients = [one.grad for one in model.adapters.parameters() if one.grad is not None]
    assert any(bool(one.any()) for one in gradients) and all(bool(one.isfinite().all()) for one in gradients)
    model.zero_grad()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_attach_and_load(mode: str, kind: str, tmp_path: Path) -> None:
    """Invariant 153."""
    ids, memory = tiny.text(2), tiny.memory(2)
    saved = tiny.open_gates(mmattn.attach(tiny.make("llama"), KINDS[kind]()))
    saved.save_adapter(tmp_path)
    with torch.no_grad():
        wanted = saved(ids, memory=memory).logits
    host = tiny.make("llama")
    with MODES[mode]():
        model = mmattn.attach(host, KINDS[kind]())
    check_dtype(model, mode)
    tiny.open_gates(model)
    check_trains(model)
    model.unload()
    host = tiny.make("llama")
    with MODES[mode]():
        loaded = mmattn.load(host, tmp_path)
        mmattn.load(loaded, tmp_path, "second")
        loaded.add_adapter("third", mmattn.GatedAdapter(memory_dim=13, every=2, num_heads=2))
    check_dtype(loaded, mode)
    loaded.delete_adapter("third")
    loaded.delete_adapter("second")
    with torch.no_grad():
        tiny.assert_close(loaded(ids, memory=memory).logits, wanted)
    check_trains(loaded)


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "autocast"])
def test_calibrate(mode: str) -> None:
    """Invariant 153."""
    model = mmattn.attach(tiny.make("llama"), KINDS["gated"]())
    with MODES[mode]():
        model.calibrate(tiny.text(2), memory=tiny.memory(2))
    check_dtype(model, mode)
    check_trains(tiny.open_gates(model))


@pytest.mark.parametrize("mode", [name for name in MODES if name != "autocast"])
def test_weights_that_begin_as_the_hosts(mode: str) -> None:
    """Invariant 153: of a UNet, whose projections are copied as they are."""
    unet = tiny_unets.make()
    wanted = tiny_unets.attach(tiny_unets.make(), opened=False, **COPIED).adapters.state_dict()
    with MODES[mode]():
        model = mmattn.attach(unet, tiny_unets.adapter(**COPIED))
    check_dtype(model, mode)
    state = model.adapters.state_dict()
    copied = [name for name in state if "k_proj" in name or "v_proj" in name]
    assert copied and all(torch.equal(state[name].float(), wanted[name]) for name in copied)


def test_weights_without_values_are_refused(tmp_path: Path) -> None:
    """Invariant 153: nothing is changed then."""
    host = tiny.make("llama")
    mmattn.attach(tiny.make("llama"), KINDS["gated"]()).save_adapter(tmp_path)
    before = dict(vars(host))
    for put in (lambda: mmattn.attach(host, KINDS["gated"]()), lambda: mmattn.load(host, tmp_path)):
        with (
            init_empty_weights(include_buffers=False),
            pytest.raises(ConditionError, match="outside of init_empty_weights"),
        ):
            put()
    assert vars(host).keys() == before.keys()
    model = mmattn.attach(host, KINDS["gated"]())
    with (
        init_empty_weights(include_buffers=False),
        pytest.raises(ConditionError, match="outside of init_empty_weights"),
    ):
        model.add_adapter("second", KINDS["gated"]())
    assert list(model.adapters) == model.active == ["default"]
