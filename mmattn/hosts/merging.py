"""Several adapters of one host as one: the weighted sum of their weights (model soups, arXiv 2203.05482, section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from mmattn.errors import AttachError, ConfigError, check_float

if TYPE_CHECKING:
    from mmattn.hosts.adapted import AdaptedModel


@torch.no_grad()
def add_weighted(model: AdaptedModel, names: Sequence[str], weights: Sequence[float], name: str) -> None:
    """What `AdaptedModel.add_weighted_adapter` does; everything is checked before the host is touched."""
    if isinstance(names, str) or not names:
        raise ConfigError(f"give the names of the adapters to merge as a list, got {names!r}")
    if len(weights) != len(names):
        raise ConfigError(f"each adapter needs one weight: got {len(weights)} weights for {list(names)}")
    shares = [check_float(f"weights[{place}]", weight) for place, weight in enumerate(weights)]
    parts = [model._adapter(one) for one in names]
    first = asdict(parts[0].config)
    for one, part in zip(names[1:], parts[1:], strict=True):
        other = asdict(part.config)
        differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if type(part.config) is not type(parts[0].config) or differing:
            what = ", ".join(f"{key} {first.get(key)!r} and {other.get(key)!r}" for key in differing[:5])
            raise AttachError(
                f"adapters {names[0]!r} and {one!r} differ ({what or 'in kind'}), and only adapters of equal settings "
                "have weights that belong together: use both at once with set_adapter, or train them alike"
            )
    active = list(model.active)
    model.add_adapter(name, parts[0].config)
    model.active = active
    merged = model._adapter(name)
    states = [part.state_dict() for part in parts]
    for key, value in merged.state_dict().items():
        total = sum(
            share * state[key].to(value.device, torch.float64) for share, state in zip(shares, states, strict=True)
        )
        value.copy_(total)
