"""Names of the slots of a memory: by its sources, the patches of a grid, or times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, ShapeError, check_float
from mmattn.memory import Memory


def named_sources(
    memory: Memory, sources: Sequence[str | None] | None = None, grid: tuple[int, int] | None = None
) -> tuple[list[str], Tensor]:
    """The names of a memory's sources, and the source (m,) of each slot, -1 for a slot that is masked or has none."""
    if grid is not None:
        if grid[0] * grid[1] != memory.length or sources is not None:
            raise ShapeError(
                f"a grid of {grid[0]} × {grid[1]} and names do not fit {memory.length} slots: give one of them"
            )
        # A grid is drawn whole: the weights of a masked patch are 0.
        patches = [f"row {i // grid[1] + 1}, column {i % grid[1] + 1}" for i in range(memory.length)]
        return patches, torch.arange(memory.length)
    slots: Sequence[Any]
    if sources is None:
        slots = memory.sources[0] if memory.sources else [f"slot {slot}" for slot in range(memory.length)]
    else:
        slots = sources
    if len(slots) != memory.length:
        raise ShapeError(f"sources must name each of {memory.length} slots, got {len(slots)}")
    return _group(slots, memory.real_slots()[0].tolist())


def _group(slots: Sequence[Any], real: Sequence[bool]) -> tuple[list[str], Tensor]:
    """Gather the slots of each source: the slots of one passage are one source, although each names its slot."""
    numbers: dict[str, int] = {}
    labels: list[str] = []
    owner = torch.full((len(slots),), -1)
    for slot, source in enumerate(slots):
        if source is None or not real[slot]:
            continue
        whole = {key: value for key, value in source.items() if key != "slot"} if isinstance(source, dict) else source
        key = json.dumps(whole, sort_keys=True)
        if key not in numbers:
            numbers[key] = len(labels)
            labels.append(slot_name(whole))
        owner[slot] = numbers[key]
    if not labels:
        raise ConfigError("no slot of this memory that may be attended to has a source: there is nothing to explain by")
    return labels, owner


def media_names(memory: Memory, every: float | None = None, *, row: int = 0) -> list[str | None]:
    """A name for each slot of a memory of a sound, a series or a video, by its time; None for padding.

    Args:
        memory: of an encoder, with its sources.
        every: gather slots in stretches of so many seconds, or time steps of a series, by where they begin: slots of
            one name are one source to `attribute`.
        row: of the memory.

    Raises:
        ConfigError: sources that have no times.

    >>> sources = [[{"audio": 0, "start": 0.3, "end": 0.34}, {"video": 0, "frame": 2, "time": 1.0, "patch": [0, 3]}]]
    >>> media_names(Memory(torch.zeros(1, 2, 3), sources=sources))
    ['0.30–0.34 s', '1.00 s, row 1, column 4']
    >>> media_names(Memory(torch.zeros(1, 1, 3), sources=[sources[0][:1]]), every=0.25)
    ['0.25–0.50 s']
    """
    sources = memory.sources[row] if memory.sources is not None else [{}]
    if any(source is not None and not _has_time(source) for source in sources):
        raise ConfigError(
            "this memory has no sources that say when its slots are: give one of an encoder of sounds, series or videos"
        )
    if every is not None:
        check_float("every", every, at_least=1e-6)
        sources = [
            _stretch(source, every) if source is not None and "start" in source else source for source in sources
        ]
    return [None if source is None else slot_name(source) for source in sources]


def _has_time(source: object) -> bool:
    return isinstance(source, dict) and ("start" in source or "time" in source)


def _stretch(source: dict[str, Any], every: float) -> dict[str, Any]:
    # A little later, so that the rounding of times does not count as the stretch before.
    start = int((source["start"] + 1e-6) / every) * every
    kind = "series" if "series" in source else "audio"
    return {kind: source[kind], "start": start, "end": start + every}


def slot_name(source: Any) -> str:
    """The name of a source: its text or id, its times in a sound or series, its time and patch in a video, or its JSON.

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
