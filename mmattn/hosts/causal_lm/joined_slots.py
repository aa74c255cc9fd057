"""Slots that are joined with a host's keys and values: sites, positions of the text after them, and probes."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmattn.adapters.language_models import device_of
from mmattn.adapters.protocols import Site
from mmattn.adapters.text_state import TextState
from mmattn.hosts.attention_hooks import attention_layers
from mmattn.hosts.context import ForwardStep

#: Tokens of the passage and of the text in the forwards of a probe.
PASSAGE, TEXT = 7, 5
_ADVICE = "take a GatedAdapter for this host"


def joined_sites(host: nn.Module, layers: nn.ModuleList, path: str, width: int) -> list[Site]:
    """Return the attention of every decoder layer."""
    return [
        Site(layer, "joined", name, width, device_of(host.get_submodule(name)), sizes)
        for layer, (name, sizes) in attention_layers(host, layers, path).items()
    ]


def shift_text(step: ForwardStep, text: TextState, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward with the positions of tokens that have slots before them."""
    by_id = {id(view): view for site in step.actions.values() for view, *_ in site if view.stands_in_text}
