"""Adapter files of earlier formats, brought to the newest one step by step; nothing on the disk is changed.

Format 1 to 2: settings have the words of the field (`place` is `position`, `look` is `visible_segments`), what only
published models need is in `layout`, settings that an adapter had only to refuse are gone, the host has a kind, and the
tensors of keys and values are named after `kv_proj`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mmattn.adapters.adapter_config import FORMAT_VERSION
from mmattn.core.state_names import upgrade_state_names

Value = TypeVar("Value")

_LAYOUT = ("norm", "norm_eps", "memory_norm", "activation", "feed_forward_all")
_BLOCKS, _NORMED = ("gated", "chunked", "composed"), ("joined", "inserted", "decoupled")
_POSITIONS = {"behind": "after"}


def migrate_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checked config of any format up to the newest, in the newest."""
    migrated = dict(config)
    while migrated["format_version"] < FORMAT_VERSION:
        migrated = _STEPS[migrated["format_version"]](migrated)
    return {**migrated, "adapter": _with_norms(migrated["kind"], migrated["adapter"])}


def _with_norms(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from before norms could be left out: there was one, however narrow the memory."""
    filled = dict(settings)
    if kind in _NORMED:
        filled.setdefault("memory_norm", True)
    elif kind in _BLOCKS:
        filled["layout"] = _on(filled.get("layout", {}), "memory_norm")
    else:
        return filled
    if "resampler" in filled:
        filled["resampler"] = _on(filled["resampler"], "norm")
    return filled


def _on(part: Any, name: str) -> Any:
    return {**part, name: part.get(name, True)} if isinstance(part, dict) else part


def migrate_names(named: Mapping[str, Value], version: int) -> dict[str, Value]:
    """What is named after an adapter's tensors in a file of this format, named as in the newest."""
    migrated = dict(named)
    if version < 2:
        migrated = upgrade_state_names(migrated)
    return migrated


def _to_2(config: dict[str, Any]) -> dict[str, Any]:
    kind, settings = config["kind"], dict(config["adapter"])
    if kind != "decoupled":
        if "place" in settings:
            place = settings.pop("place")
            settings["position"] = _POSITIONS.get(place, place)
        if "look" in settings:
            settings["visible_segments"] = settings.pop("look")
        layout = {name: settings.pop(name) for name in _LAYOUT if name in settings}
        if layout:
            settings["layout"] = layout
    if kind == "composed":
        # Format 1 wrote them with the only value that was accepted.
        for name, refused in (("resampler", None), ("score_bias", False)):
            if settings.get(name, refused) == refused:
                settings.pop(name, None)
    host = {**config["host"], "kind": "unet" if kind == "decoupled" else "causal_lm"}
    return {**config, "format_version": 2, "package": "mmattn", "adapter": settings, "host": host}


_STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _to_2}
