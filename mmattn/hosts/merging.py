"""Several adapters of one host as one: the weighted sum of their weights (model soups, arXiv 2203.05482, section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import AttachError, ConfigError, check_float


@torch.no_grad()
def weighted_sum(parts: Any, weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted sum of the weights of adapters of equal settings, as a state dict."""
    if isinstance(parts, str) or not parts:
        raise ConfigError(f"give the names of the adapters to merge as a list, got {parts!r}")
    names = [part.name for part in parts]
    if len(weights) != len(parts):
        raise ConfigError(f"each adapter needs one weight: got {len(weights)} weights for {names}")
    shares = [check_float(f"weights[{index}]", weight) for index, weight in enumerate(weights)]
    first = asdict(parts[0].config)
    for part in parts[1:]:
        other = asdict(part.config)
        differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if type(part.config) is not type(parts[0].config) or differing:
            what = ", ".join(f"{key} {first.get(key)!r} and {other.get(key)!r}" for key in differing[:5])
            raise AttachError(
                f"adapters {names[0]!r} and {part.name!r} differ ({what or 'in kind'}), and only adapters of equal "
                "settings have weights that belong together: use both at once with set_adapter, or train them alike"
            )
    states = [part.state_dict() for part in parts]
    return {
        key: sum(
            share * state[key].to(value.device, torch.float64) for share, state in zip(shares, states, strict=True)
        ).to(value.dtype)
        for key, value in states[0].items()
    }
