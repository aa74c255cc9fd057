"""The keywords of a call: ours are read here, all others go to the host unchanged."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import NamedTuple

from torch import nn

from mmattn.errors import ConfigError
from mmattn.hosts.peft import inner_host

#: How near a keyword of a call must be to one of ours to be taken for a slip of the pen.
NEAR = 0.81


def check_keywords(host: nn.Module, options: Sequence[str], names: Iterable[str]) -> None:
    """Refuse keywords that are near misses of ours, and that no part of the host names."""
    ours = ("memory", *options)
    for name in names:
        if name in ours:
            continue
        near = ["memory"] if name == "memories" else difflib.get_close_matches(name, ours, 1, NEAR)
        if near and name not in named_by_parts(host):
            raise ConfigError(
                f"{type(host).__name__} with adapters was called with {name}=, which neither reads: did you mean "
                f"{near[0]}=?"
            )


def keywords_of(host: nn.Module) -> frozenset[str]:
    """Return the keywords that a host names in its forward."""
    return frozenset({*_parameters(type(host).forward), *_parameters(type(inner_host(host)).forward)})


def named_by_parts(host: nn.Module) -> set[str]:
    """Return the keywords that a host or a part of it names in its forward, or when it generates."""
    names = set(getattr(host, "special_peft_forward_args", ()))
    for kind in {type(part) for part in host.modules()}:
        names |= {*_parameters(kind.forward), *_renamed(kind.forward)}
    config = getattr(host, "generation_config", None)
    return names | set(vars(config)) if config is not None else names


class Signature(NamedTuple):
    """Names of arguments of a host's forward by place, and deprecated names with those of today."""

    places: tuple[str, ...]
    renamed: Mapping[str, str]


def signature_of(host: nn.Module) -> Signature:
    """Return the arguments of a host's forward; what peft has wrapped is handed all that peft does not name."""
    forward = type(host).forward
    places = [
        name for name, parameter in _parameters(forward).items() if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    return Signature(tuple(places), _renamed(forward) | _renamed(type(inner_host(host)).forward))


@functools.cache
def _parameters(forward: Callable[..., object]) -> Mapping[str, Parameter]:
    """Return the named parameters of a forward without `self`."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    }


@functools.cache
def _renamed(forward: Callable[..., object]) -> dict[str, str]:
    """Return deprecated names that `deprecate_kwarg` of transformers takes around a forward, with those of today."""
    names: dict[str, str] = {}
    while inspect.isfunction(forward) and hasattr(forward, "__wrapped__"):
        nonlocals = inspect.getclosurevars(forward).nonlocals
        if nonlocals.get("old_name") and nonlocals.get("new_name"):
            names[nonlocals["old_name"]] = nonlocals["new_name"]
        forward = forward.__wrapped__
    return names


def shown_signature(host: nn.Module, memory_keywords: Sequence[str]) -> inspect.Signature:
    """Return the signature of a host's forward, with our keywords beside its own."""
    theirs = inspect.signature(type(host).forward)
    parameters = dict(list(theirs.parameters.items())[1:])
    for name, parameter in _parameters(type(inner_host(host)).forward).items():
        parameters.setdefault(name, parameter.replace(kind=Parameter.KEYWORD_ONLY))
    for name in ("memory", *memory_keywords):
        parameters.setdefault(name, Parameter(name, Parameter.KEYWORD_ONLY, default=None))
    return theirs.replace(parameters=sorted(parameters.values(), key=lambda parameter: parameter.kind))
