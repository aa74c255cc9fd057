"""Which keywords a host can be called with: what none of its parts names would be dropped in silence."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from mmattn.errors import ConfigError

OWN = ("memory", "images", "arrived", "window", "adapter_scale")
# Read by decorators of transformers around every forward.
DECORATED = ("return_dict",)


def check_keywords(host: nn.Module, names: Iterable[str]) -> None:
    """Refuse keywords that no part of the host names.

    Args:
        host: the language model.
        names: of the keywords.

    Raises:
        ConfigError: one is unknown to all parts of a host that takes any keyword.
    """
    unknown = [name for name in names if name not in _named(type(host).forward)]
    if not unknown:
        return
    if not _takes_any(type(host).forward):
        return  # Python itself refuses them
    from transformers.utils import TransformersKwargs

    # peft takes some for itself, by a list of its own.
    known = {*OWN, *DECORATED, *TransformersKwargs.__annotations__, *getattr(host, "special_peft_forward_args", ())}
    for kind in {type(part) for part in host.modules()}:
        known |= _named(kind.forward)
    for name in unknown:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"{type(host).__name__} was called with {name}=, which none of its parts knows and all would drop in "
                f"silence{f'; did you mean {near[0]}=?' if near else ''}"
            )


def _takes_any(forward: Any) -> bool:
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in inspect.signature(forward).parameters.values())


@functools.cache
def _named(forward: Any) -> frozenset[str]:
    """The keywords that a forward names."""
    found = inspect.signature(forward).parameters.values()
    return frozenset(one.name for one in found if one.kind is not inspect.Parameter.VAR_KEYWORD)
