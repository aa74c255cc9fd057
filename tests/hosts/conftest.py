"""Fixtures of hosts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from tests.hosts.memory_of_call import MemoryOfCall


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """Return a backend that counts what torch.compile gives it; nothing was compiled before."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.testing.CompileCounterWithBackend("eager")
    torch._dynamo.reset()


@pytest.fixture
def asked(model: Any, ids: torch.Tensor) -> MemoryOfCall:
    """Return a tiny LLaMA with an open adapter that is asked which memory a call has."""
    return MemoryOfCall(model, ids)


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log: transformers warns of managers that are kept, and a captured log holds the frames of its error."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
