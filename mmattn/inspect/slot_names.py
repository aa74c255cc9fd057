"""What a reader sees for the source of a slot."""

from __future__ import annotations

import json
from typing import Any


def slot_name(source: Any) -> str:
    """The name of a source: its text or id, its times in a sound or series, its time and patch in a video, or its JSON.

    Args:
        source: as `Memory.sources` holds it.

    >>> slot_name({"text": "a rose", "id": 7}), slot_name({"series": 0, "start": 16, "end": 32})
    ('a rose', '16–32')
    """
    if not isinstance(source, dict):
        return source if isinstance(source, str) else json.dumps(source)
    if "start" in source and "end" in source:
        series = "series" in source
        span = f"{source['start']:g}–{source['end']:g}" if series else f"{source['start']:.2f}–{source['end']:.2f} s"
        return f"{span}, band {source['band'] + 1}" if "band" in source else span
    if "video" in source and "time" in source:
        place = "".join(
            f", {name} {at + 1}" for name, at in zip(("row", "column"), source.get("patch", ()), strict=False)
        )
        return f"{source['time']:.2f} s{place}"
    return str(source.get("text") or source.get("id") or json.dumps(source))
