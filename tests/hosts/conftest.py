"""Fixtures of hosts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from tests import tiny


class MemoryOfCall:
    """A host with two memories, "A" and "B", and its outputs with each and with "none"."""

    def __init__(self, model, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        self.A = tiny.memory(ids.shape[0])
        self.B = tiny.memory(ids.shape[0], m=11, seed=1)
        with torch.no_grad():
            self.answers = {name: model(ids, memory=getattr(self, name)).logits for name in "AB"}
            self.answers["none"] = model(ids).logits

    def __call__(self) -> str:
        """Return the name of the memory of a call of the host made here."""
        with torch.no_grad():
            logits = self.model.host(self.ids).logits
        return next((name for name, answer in self.answers.items() if torch.equal(answer, logits)), "another")

    def quietly(self) -> str:
        """Return the same without the warning of a block that is open elsewhere."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self()


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
