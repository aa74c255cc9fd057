"""Changes of a host with adapters, one at a time: its LoRAs, and what a call is made under."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import hotswap_adapter_from_state_dict
from torch import nn

import mmattn
from tests import tiny
from tests.computed import Change, Subject
from tests.computed_changes import (
    PARAMETRIZED,
    UNCOUNTED,
    WAYS,
    Way,
    add,
    half_and_back,
    new_parameters,
    noise,
    optimizer,
)
from tests.hosts.host_caches import fill, lora_config


def _of_host(way: Way) -> Any:
    return lambda subject: way(subject.host)


def _of_adapter(way: Way) -> Any:
    return lambda subject: way(subject.model.adapters)


# LoRA ----------------------------------------------------------------------------------------------------------------


def _layers(subject: Subject) -> list[Any]:
    return [part for part in subject.host.modules() if isinstance(part, LoraLayer)]


def _up(subject: Subject) -> nn.Module:
    return nn.ModuleList([layer.lora_B["default"] for layer in _layers(subject)])


def _frozen(do: Callable[[Subject], object]) -> Callable[[Subject], None]:
    """Make a change of peft, which trains what it activates, and freeze the host again."""

    def apply(subject: Subject) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            do(subject)
        subject.host.requires_grad_(False)

    return apply


def _add_third(is_active: bool) -> Callable[[Subject], None]:
    def apply(subject: Subject) -> None:
        subject.peft.add_adapter("third", lora_config(r=3))
        fill(subject.host, 17)
        if is_active:
            subject.peft.set_adapter("third")

    return _frozen(apply)


def _weighted(subject: Subject) -> None:
    subject.peft.add_weighted_adapter(["default", "second"], [0.7, -0.4], "both", combination_type="linear")
    subject.peft.set_adapter("both")


def _hotswap(size: float) -> Callable[[Subject], None]:
    def apply(subject: Subject) -> None:
        state = {name: one for name, one in subject.peft.state_dict().items() if "lora_" in name and ".default" in name}
        state = {name: one + noise(one, seed, size) for seed, (name, one) in enumerate(state.items())}
        hotswap_adapter_from_state_dict(subject.peft, state, "default", lora_config(lora_alpha=20))

    return _frozen(apply)


def _write_scaling(subject: Subject) -> None:
    for layer in _layers(subject):
        layer.scaling["default"] = 0.5


@contextmanager
def _merged(subject: Subject) -> Iterator[None]:
    subject.peft.merge_adapter()
    yield
    subject.peft.unmerge_adapter()


@contextmanager
def _set_scale(subject: Subject) -> Iterator[None]:
    for layer in _layers(subject):
        layer.set_scale("default", 0.3)
    yield
    for layer in _layers(subject):
        layer.set_scale("default", 1.0)


@contextmanager
def _scale_layer(subject: Subject) -> Iterator[None]:
    for layer in _layers(subject):
        layer.scale_layer(0.3)
    yield
    for layer in _layers(subject):
        layer.unscale_layer()


@contextmanager
def _disabled_by_layer(subject: Subject) -> Iterator[None]:
    for layer in _layers(subject):
        layer.enable_adapters(False)
    yield
    for layer in _layers(subject):
        layer.enable_adapters(True)
    subject.host.requires_grad_(False)


#: Of a LoRA of any library.
LORA = [
    Change("LoRA: set_scale", _set_scale),
    Change("LoRA: scale_layer", _scale_layer),
    Change("LoRA: scaling[…] =", _write_scaling),
    Change("LoRA: enable_adapters(False)", _disabled_by_layer),
    Change("LoRA: weights, add_", lambda subject: add(_up(subject))),
    Change("LoRA: weights, fused", lambda subject: optimizer(torch.optim.AdamW, fused=True)(_up(subject))),
    Change("LoRA: weights, new", lambda subject: new_parameters(_up(subject))),
]
#: Of a LoRA in a peft model.
PEFT = [
    Change("LoRA: rescale_adapter_scale", lambda subject: rescale_adapter_scale(subject.peft, 0.3)),
    Change("LoRA: disable_adapter", lambda subject: subject.peft.disable_adapter()),
    Change("LoRA: set_adapter", _frozen(lambda subject: subject.peft.set_adapter("second"))),
    Change("LoRA: two active", _frozen(lambda subject: subject.peft.base_model.set_adapter(["default", "second"]))),
    Change("LoRA: deleted", _frozen(lambda subject: subject.peft.delete_adapter("default"))),
    Change("LoRA: added and active", _add_third(True)),
    Change("LoRA: added, idle", _add_third(False), is_equal=True),
    Change("LoRA: weighted sum", _frozen(_weighted)),
    Change("LoRA: merged", _merged, is_equal=True),
    Change("LoRA: unloaded", _frozen(lambda subject: subject.peft.unload())),
    Change("LoRA: merged and unloaded", _frozen(lambda subject: subject.peft.merge_and_unload()), is_equal=True),
    Change("LoRA: hotswap", _hotswap(0.3)),
    Change("LoRA: hotswap, another alpha", _hotswap(0.0)),
]
#: Of a LoRA in a model of diffusers.
DIFFUSERS = [
    Change("LoRA: set_adapter", _frozen(lambda subject: subject.host.set_adapter("second"))),
    Change("LoRA: set_adapters, weight", _frozen(lambda subject: subject.host.set_adapters("default", 0.4))),
    Change("LoRA: disable_adapters", _frozen(lambda subject: subject.host.disable_adapters())),
    Change("LoRA: disable_lora", _frozen(lambda subject: subject.host.disable_lora())),
    Change("LoRA: delete_adapters", _frozen(lambda subject: subject.host.delete_adapters("default"))),
    Change("LoRA: fuse_lora", _frozen(lambda subject: subject.host.fuse_lora(0.4))),
    Change("LoRA: unload_lora", _frozen(lambda subject: subject.host.unload_lora())),
]


# What a call is made under -------------------------------------------------------------------------------------------


@contextmanager
def _none_active(subject: Subject) -> Iterator[None]:
    before = list(subject.model.active)
    subject.model.set_adapter([])
    yield
    subject.model.set_adapter(before)


def _attach_second(subject: Subject) -> None:
    """Attach a second adapter to the last layer, that adds nothing without a memory of its own."""
    active = list(subject.model.active)
    settings = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(2,), num_heads=2, head_dim=8)
    mmattn.attach(subject.model, settings, "second").adapters.requires_grad_(False)
    subject.model.set_adapter(active)


def _train(subject: Subject) -> None:
    subject.model.train()


CALL = [
    Change("call: autocast bfloat16", lambda _: torch.autocast("cpu", torch.bfloat16), is_of_host=False),
    Change("call: autocast float16", lambda _: torch.autocast("cpu", torch.float16), is_of_host=False),
    Change("call: inference mode", lambda _: torch.inference_mode(), is_of_host=False, is_equal=True),
    Change("call: train()", _train, is_of_host=False, is_equal=True),
]
OF_LM = [
    Change("call: default dtype", lambda _: tiny.default_dtype(torch.float64), is_of_host=False, is_equal=True),
    Change("call: second adapter", _attach_second, is_of_host=False, is_equal=True),
]
#: Of an open block, which no change of the active adapters closes.
IN_BLOCK = [
    Change("call: disable_adapter", lambda subject: subject.model.disable_adapter(), is_of_host=False),
    Change("call: set_adapter([])", _none_active, is_of_host=False),
]
ADAPTER = [Change(f"adapter: {name}", _of_adapter(way), is_of_host=False) for name, way in WAYS.items()]
HOST = [
    *[Change(f"host: {name}", _of_host(way)) for name, way in (WAYS | PARAMETRIZED).items()],
    Change("host: bfloat16 and back", _of_host(half_and_back), is_of_host=False),
]
#: What memory does not notice, as its pages say; files do, where they are opened.
HOST_UNCOUNTED = [Change(f"host: {name}", _of_host(way)) for name, way in UNCOUNTED.items()]
ADAPTER_UNCOUNTED = [Change(f"adapter: {name}", _of_adapter(way), is_of_host=False) for name, way in UNCOUNTED.items()]
ADAPTER_AND_BACK = Change("adapter: bfloat16 and back", _of_adapter(half_and_back), is_of_host=False)
