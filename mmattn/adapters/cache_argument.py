"""Names of transformers' cache argument: `cache` since 5.24, `past_key_values` or `cache_params` before."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

NAMES = ("cache", "past_key_values", "cache_params")
CACHE_NAMES = frozenset(NAMES)


def given_cache(values: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, or in an output; None where there is none.

    >>> given_cache({"input_ids": [1, 2], "cache": "what was read"})
    'what was read'
    """
    return next((values[name] for name in NAMES if values.get(name) is not None), None)


def cache_name(model: nn.Module) -> str:
    """Under which name a model takes its cache."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known and "past_key_values" not in known else "past_key_values"
