"""The keywords of a call: ours are read here, all others go to the host as they came, which judges them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from mmattn.errors import ConfigError
from mmattn.hosts.interop.peft import inner_host

#: How near a keyword of a call must be to one of ours to be taken for a slip of the pen.
NEAR = 0.81


def check_keywords(model: Any, names: Iterable[str]) -> None:
    """Refuse keywords that are near misses of ours, and that no part of the host names.

    Args:
        model: the adapted model.
        names: of the keywords.

    Raises:
        ConfigError: one is.
    """
    ours = ("memory", *model.memory_keywords)
    for name in names:
        if name in ours:
            continue
        near = ["memory"] if name == "memories" else difflib.get_close_matches(name, ours, 1, NEAR)
        if near and name not in named_by_parts(model.host):
            raise ConfigError(
                f"{type(model.host).__name__} with adapters was called with {name}=, which neither reads: did you mean "
                f"{near[0]}=?"
            )


def named_by_parts(host: nn.Module) -> set[str]:
    """The keywords that a host or a part of it names in its forward, or when it generates; peft has a list of its own.

    Args:
        host: the frozen model.
    """
    known = set(getattr(host, "special_peft_forward_args", ()))
    for kind in {type(part) for part in host.modules()}:
        known |= {*_parameters(kind.forward), *_renamed(kind.forward)}
    own = getattr(host, "generation_config", None)
    return known | set(vars(own)) if own is not None else known


def arguments_by_name(
    host: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call under the names that the host's forward has for them: those given by their place, and
    those under a name of before, which decorators of transformers still take.

    Args:
        host: the model, or the part of one, that is called.
        args: without names; they stay so where its forward names none.
        kwargs: by name.
    """
    forward = type(host).forward
    by_name = dict(kwargs)
    if args:
        places = [name for name, one in _parameters(forward).items() if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
        if len(args) > len(places) or set(places[: len(args)]) & set(kwargs):
            return args, by_name  # the host says itself what it does not take
        by_name = dict(zip(places, args, strict=False)) | by_name
    # What peft has wrapped is handed all that peft does not name.
    for old, new in (_renamed(forward) | _renamed(type(inner_host(host)).forward)).items():
        if old in by_name:
            value = by_name.pop(old)
            by_name.setdefault(new, value)
    return (), by_name


@functools.cache
def _parameters(forward: Callable[..., Any]) -> Mapping[str, Parameter]:
    """The parameters that a forward names, but for the model itself."""
    found = list(inspect.signature(forward).parameters.values())[1:]
    return {one.name: one for one in found if one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}


@functools.cache
def _renamed(forward: Any) -> dict[str, str]:
    """The names of before that transformers' `deprecate_kwarg` takes around a forward, with those of today."""
    found: dict[str, str] = {}
    while inspect.isfunction(forward) and hasattr(forward, "__wrapped__"):
        known = inspect.getclosurevars(forward).nonlocals
        if known.get("old_name") and known.get("new_name"):
            found[known["old_name"]] = known["new_name"]
        forward = forward.__wrapped__
    return found


def shown_as(model: Any, host: nn.Module) -> Any:
    """The class of an adapted model whose forward has the signature of the host's, with our keywords beside it.

    Trainers ask a model's forward which columns of the data it reads, and its class which of them are labels.

    Args:
        model: the adapted model, of the class of its kind.
        host: the frozen model.
    """
    classes: tuple[Any, ...] = (type(model), type(host), type(inner_host(host)))
    return _shown_as(*classes)


@functools.cache
def _shown_as(kind: Any, host: Any, inner: Any) -> Any:
    own: Any = kind.forward

    @torch.compiler.disable(recursive=False)  # the adapted model stays outside of the graph of its host
    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_keywords(self, kwargs)
        return own(self, *args, **kwargs)

    theirs, ours = inspect.signature(host.forward), inspect.signature(own)
    # A kind that names what it is given by its place says the order.
    first = theirs if any(one.kind is Parameter.VAR_POSITIONAL for one in ours.parameters.values()) else ours
    parameters = {name: one for name, one in first.parameters.items() if one.kind is not Parameter.VAR_KEYWORD}
    for known in (_parameters(host.forward), _parameters(inner.forward), _parameters(own)):
        for name, one in known.items():
            parameters.setdefault(name, one.replace(kind=Parameter.KEYWORD_ONLY))
    parameters |= {name: one for name, one in theirs.parameters.items() if one.kind is Parameter.VAR_KEYWORD}
    ordered = sorted(parameters.values(), key=lambda one: one.kind)
    forward.__signature__ = theirs.replace(parameters=ordered)
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward}
    return type(f"Adapted{host.__name__}", (kind,), names)
