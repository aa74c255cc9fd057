"""Errors of recipes and their settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn


def meant(name: str, known: Iterable[str]) -> str:
    """The hint at what a misspelt name may mean, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def refuse(message: str) -> NoReturn:
    """Raise a ConfigError."""
    # `mmattn.errors` imports torch, and the command line is to answer at once.
    from mmattn.errors import ConfigError

    raise ConfigError(message)
