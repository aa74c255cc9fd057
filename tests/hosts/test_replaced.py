"""What is replaced on objects of torch and transformers is still there, with the arguments that are relied on."""

from __future__ import annotations

import importlib
import inspect

import pytest

from mmattn.hosts.replaced import REPLACED, Replaced


@pytest.mark.parametrize("one", REPLACED, ids=lambda one: f"{one.owner.partition(':')[2]}.{one.name}")
def test_upstream_has_what_is_replaced(one: Replaced):
    module, _, name = one.owner.partition(":")
    owner = getattr(importlib.import_module(module), name)
    methods = [vars(base)[one.name] for base in owner.__mro__ if one.name in vars(base)]
    assert methods, f"{one.owner} has no {one.name} any more: {one.why}"
    assert set(one.arguments) <= set(inspect.signature(methods[0]).parameters), one
