"""Our own kinds of adapters and hosts, through the suites that every kind must pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mmattn
from mmattn.testing import Case, HostCase, adapter_checks, host_checks
from mmattn.testing.running import Check
from tests import composing, tiny, tiny_unets

SMALL: dict[str, Any] = {"memory_dim": tiny.MEMORY_DIM, "layers": (0, 2), "num_heads": 2, "head_dim": 6}
CALM = SMALL | {"memory_dim": composing.DIM, "augmenting_layers": composing.AUGMENTING_LAYERS}


def language(family: str) -> Callable[[], Any]:
    """Makes a tiny language model."""
    return functools.partial(tiny.make, family)


def unet(kind: str) -> Callable[[], Any]:
    """Makes a tiny UNet."""
    return functools.partial(tiny_unets.make, kind)


def reading_along(generator: torch.Generator, rows: int) -> mmattn.AugmentingModel:
    """Another language model for the same text."""
    return composing.along(seed=int(torch.randint(1000, (), generator=generator)))


# Adapters, hosts, and what is not usual about their memories.
ADAPTERS: dict[str, Callable[[], Case]] = {
    "gated, llama": lambda: Case(mmattn.GatedAdapter(**SMALL), language("llama")),
    "gated with scores and a null slot before bloom": lambda: Case(
        mmattn.GatedAdapter(**SMALL, position="before", score_bias=True, null_slot=True, gate="head"),
        language("bloom"),
    ),
    "gated, mixtral": lambda: Case(mmattn.GatedAdapter(**SMALL, gate="channel"), language("mixtral")),
    "gated, latest image, gptj": lambda: Case(
        mmattn.GatedAdapter(**SMALL, visible_segments="latest"), language("gptj")
    ),
    "gated with a resampler, gemma2": lambda: Case(
        mmattn.GatedAdapter(**SMALL, resampler=mmattn.Resampler(num_latents=3, depth=1, num_heads=1, head_dim=4)),
        language("gemma2"),
    ),
    "chunked, llama": lambda: Case(mmattn.ChunkedAdapter(**SMALL, chunk_size=3), language("llama")),
    "chunked, bloom": lambda: Case(mmattn.ChunkedAdapter(**SMALL, chunk_size=3), language("bloom")),
    "composed, llama": lambda: Case(mmattn.ComposedAdapter(**CALM), language("llama"), reading_along),
    "composed, gptj": lambda: Case(mmattn.ComposedAdapter(**CALM, own_place=True), language("gptj"), reading_along),
    "decoupled, unet": lambda: Case(mmattn.DecoupledAdapter(tiny.MEMORY_DIM), unet("stable")),
    "decoupled with a projection, sdxl": lambda: Case(
        mmattn.DecoupledAdapter(tiny.MEMORY_DIM, tokens=2, blocks=("up",)), unet("sdxl")
    ),
}

BOTH = (mmattn.GatedAdapter(**SMALL), mmattn.GatedAdapter(**SMALL, position="before"))
HOSTS: dict[str, Callable[[], HostCase]] = {
    "llama": lambda: HostCase(language("llama"), BOTH),
    "bloom": lambda: HostCase(language("bloom"), BOTH),
    "mixtral": lambda: HostCase(language("mixtral"), BOTH),
    "opt": lambda: HostCase(language("opt"), BOTH),
    "unet": lambda: HostCase(unet("stable"), [mmattn.DecoupledAdapter(tiny.MEMORY_DIM)]),
    "k unet": lambda: HostCase(unet("k"), [mmattn.DecoupledAdapter(tiny.MEMORY_DIM)]),
}


@functools.cache
def case_of(name: str) -> Case:
    """One case for all checks: what they ask with is made once, what they change is made anew."""
    return {**ADAPTERS, **HOSTS}[name]()


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("check", adapter_checks())
def test_adapters(check: Check, name: str) -> None:
    check(case_of(name))


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("check", host_checks())
def test_hosts(check: Check, name: str) -> None:
    check(case_of(name))
