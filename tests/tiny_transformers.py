"""Makers of tiny random hosts of diffusers, by family or kind of UNet, and what any of them is called with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import mmattn
from mmattn.testing.case import stir
from tests import tiny_unets
from tests.tiny import MEMORY_DIM
from tests.transformer_sizes import sizes

TEXT_LENGTH = 5


@contextlib.contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Weights that a class leaves empty are not what lay in the memory before."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def make(family: str = "SD3Transformer2DModel", seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny random transformer or UNet in eval mode, the same for the same `seed`."""
    if family in tiny_unets.KINDS:
        return tiny_unets.make(family, seed, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _empty_is_nan():
            host: nn.Module = getattr(diffusers, family)(**sizes(family) | changes).eval()
        with torch.no_grad():
            for parameter in host.parameters():
                if not bool(parameter.isfinite().all()) or bool((parameter == 0).all()):
                    parameter.normal_(0, 0.1)  # left empty, or begun as nothing
    return host


def attach(host: Any, *, opened: bool = True, name: str = "default", **settings: Any) -> Any:
    """`mmattn.attach` with an adapter, its values random unless told."""
    model = mmattn.attach(host, mmattn.DecoupledAdapter(**{"memory_dim": MEMORY_DIM} | settings), name)
    if opened:
        stir(model.adapter(name))
    return model


def given(model: Any, rows: int = 3, seed: int = 0) -> dict[str, Any]:
    """What a host of diffusers is called with: picture, time step, text and whatever else it takes."""
    batch: dict[str, Any] = model.example_batch(torch.Generator().manual_seed(seed), None, rows)
    return batch


@torch.no_grad()
def run(model: Any, batch: dict[str, Any], **more: Any) -> Tensor:
    """What it predicts."""
    answer = model(**batch, **more)
    found: Tensor = answer if isinstance(answer, Tensor) else answer[0]
    return found
