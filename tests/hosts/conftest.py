"""The host and the text of the tests that need no more than one of each."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests import tiny


@pytest.fixture
def model():
    """A tiny LLaMA with an open adapter."""
    return tiny.attach(tiny.make("llama"))


@pytest.fixture
def ids() -> Tensor:
    """Token ids (3, 7)."""
    return tiny.text(3, 7)
