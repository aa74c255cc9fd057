"""Attention over sounds, series and videos: traces that lie over a spectrogram, a waveform, curves or a film strip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.encoders import Frame, LogMelEncoder, load_audio, load_image
from mmattn.errors import ConfigError, ShapeError, check_choice, check_float
from mmattn.inspect.record_attention import slot_name
from mmattn.inspect.trace import Trace
from mmattn.memory import Memory

#: Pixels of the picture of a sound or a series, and the height of a frame in a strip.
_WIDTH, _HEIGHT = 1024, 128
_RATE, _BANDS = 16_000, 64


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
    return [None if source is None else slot_name(source) for source in _sources(memory, every, row)]


def over_sound(
    trace: Trace,
    memory: Memory,
    sound: Any,
    sampling_rate: int | None = None,
    *,
    kind: str = "spectrogram",
    every: float | None = None,
    row: int = 0,
) -> Trace:
    """A trace whose sources lie over the picture of a sound, each where it is heard.

    Args:
        trace: of `attribute`, or with sources named by `media_names`.
        memory: of the sound.
        sound: of any kind that `load_audio` reads.
        sampling_rate: of an array.
        kind: "spectrogram" (mel bands, the lowest at the bottom) or "waveform".
        every: as in `media_names`, where the sources were named so.
        row: of the memory.

    Raises:
        ConfigError: sources of the trace that are not of this memory.
        AudioError: the sound cannot be read.
    """
    check_choice("kind", kind, ("spectrogram", "waveform"))
    wave = load_audio(sound, _RATE, source_rate=sampling_rate, max_clipped=1)
    picture = _spectrogram(wave) if kind == "spectrogram" else _curves(wave[:, None])
    spans = _spans(trace, memory, every, row)
    return replace(trace, spans=spans, extent=len(wave) / _RATE, unit="s", grid=None, picture=load_image(picture))


def over_series(trace: Trace, memory: Memory, series: Any, *, every: float | None = None, row: int = 0) -> Trace:
    """A trace whose sources lie over the curves of a time series, those of its channels one under the other.

    Args:
        trace: of `attribute`, or with sources named by `media_names`.
        memory: of the series, with time steps in its sources.
        series: (length, channels) or (length,), as it was encoded.
        every: as in `media_names`, where the sources were named so.
        row: of the memory.

    Raises:
        ConfigError: sources of the trace that are not of this memory.
        ShapeError: a series of another shape.
    """
    values = torch.as_tensor(series).detach().float().cpu()
    values = values[:, None] if values.dim() == 1 else values
    if values.dim() != 2 or not values.numel():
        raise ShapeError(f"a series is (length, channels) or (length,), got {tuple(values.shape)}")
    spans = _spans(trace, memory, every, row)
    picture = load_image(_curves(values))
    return replace(trace, spans=spans, extent=float(len(values)), unit="", grid=None, picture=picture)


def over_frames(trace: Trace, memory: Memory, frames: Sequence[Frame], *, row: int = 0) -> Trace:
    """A trace whose sources lie over the frames of a video, side by side in a strip, in the order of time.

    Args:
        trace: of `attribute`, or with sources named by `media_names`; of every frame that it names all patches.
        memory: of a `VideoEncoder`.
        frames: those that were encoded, as `stream_frames` gives them.
        row: of the memory.

    Raises:
        ConfigError: sources of the trace that are not of this memory, patches that are missing, or frames that are not
            those of the memory.
    """
    named = {
        slot_name(source): (source["time"], *source.get("patch", (0, 0)))
        for source in _sources(memory, None, row)
        if source is not None and "time" in source
    }
    places = [_found(named, name) for name in trace.sources]
    times = sorted({place[0] for place in places})
    images = {frame.time: frame.image for frame in frames}
    for time in times:
        if time not in images:
            raise ConfigError(
                f"the memory has a frame at {time:g} s, and frames has none: give those that were encoded"
            )
    rows, columns = (1 + max(place[axis] for place in named.values()) for axis in (1, 2))
    # A grid is read row by row, and each of its rows goes through all frames.
    patches = [(time, r, c) for r in range(rows) for time in times for c in range(columns)]
    if sorted(places) != sorted(patches):
        raise ConfigError(
            f"a strip of {len(times)} frames has {len(patches)} patches, and the trace names {len(places)} sources: "
            "give all patches of each frame"
        )
    order = [places.index(place) for place in patches]
    moved: dict[str, Any] = {
        name: None if getattr(trace, name) is None else getattr(trace, name)[..., order]
        for name in ("weights", "rollout", "dropped")
    }
    moved["sources"] = [trace.sources[number] for number in order]
    picture = load_image(_strip([images[time] for time in times]))
    return replace(trace, grid=(rows, columns * len(times)), spans=None, picture=picture, **moved)


def _sources(memory: Memory, every: float | None, row: int) -> list[dict[str, Any] | None]:
    """The sources of a row, as they are or gathered in stretches."""
    sources = memory.sources[row] if memory.sources is not None else [{}]
    for source in sources:
        if source is not None and not (isinstance(source, dict) and ("start" in source or "time" in source)):
            raise ConfigError(
                "this memory has no sources that say when its slots are: give one of an encoder of sounds, series or "
                "videos"
            )
    if every is None:
        return sources
    check_float("every", every, at_least=1e-6)
    return [source if source is None or "time" in source else _stretch(source, every) for source in sources]


def _stretch(source: dict[str, Any], every: float) -> dict[str, Any]:
    # A little later, so that the rounding of times does not count as the stretch before.
    start = int((source["start"] + 1e-6) / every) * every
    kind = "series" if "series" in source else "audio"
    return {kind: source[kind], "start": start, "end": start + every}


def _spans(trace: Trace, memory: Memory, every: float | None, row: int) -> list[tuple[float, float, float, float]]:
    sources = [source for source in _sources(memory, every, row) if source is not None and "start" in source]
    bands = 1 + max((source.get("band", 0) for source in sources), default=0)
    named = {
        slot_name(source): (
            source["start"],
            source["end"],
            source.get("band", 0) / bands,
            (source["band"] + 1) / bands if "band" in source else 1.0,
        )
        for source in sources
    }
    return [_found(named, name) for name in trace.sources]


def _found(named: dict[str, Any], name: str) -> Any:
    if name not in named:
        raise ConfigError(
            f"{name!r} is no slot of this memory: name the sources of the trace with media_names(memory), and give "
            "that memory"
        )
    return named[name]


def _spectrogram(wave: Tensor) -> Tensor:
    """Pixels (h, w), dark where it is loud, the lowest band at the bottom."""
    wave = F.pad(wave, (0, max(0, 400 - len(wave))))
    loud = LogMelEncoder(_BANDS, 1, normalization="whisper")(wave, max_clipped=1).tokens[0]
    columns = F.adaptive_max_pool1d(loud.T[None], min(_WIDTH, len(loud)))[0]
    # The features count four decades as 1; the loudest five are seen.
    shade = (1 + (columns - columns.max()) * 4 / 5).clamp_min(0) if columns.max() > columns.min() else columns * 0
    grown = F.interpolate(shade.flip(0)[None, None], size=(_HEIGHT, _WIDTH), mode="nearest")[0, 0]
    return (255 * (1 - grown)).round().to(torch.uint8)


def _curves(values: Tensor) -> Tensor:
    """Pixels (h, w) of values (length, channels): for each channel, of each column, from the least to the largest."""
    height = max(_HEIGHT // values.shape[1], 24)
    parts = []
    for channel in values.T:
        # What was not observed is no curve.
        observed = channel[channel.isfinite()]
        low, high = (float(observed.min()), float(observed.max())) if len(observed) else (0.0, 1.0)
        scaled = (channel - low) / max(high - low, 1e-9) * (height - 3) + 1
        page = torch.full((height, _WIDTH), 255, dtype=torch.uint8)
        edges = torch.linspace(0, len(scaled), _WIDTH + 1).long()
        levels = torch.arange(height)
        for column, (start, stop) in enumerate(zip(edges.tolist(), edges[1:].tolist(), strict=False)):
            # One point more, so that a curve is not broken between columns.
            part = scaled[start : max(start + 1, stop) + 1]
            part = part[part.isfinite()]
            if len(part):
                inside = (levels >= part.min().floor()) & (levels <= part.max().ceil())
                page[inside.flip(0), column] = 60
        parts.append(page)
    return torch.cat(parts)


def _strip(images: Sequence[Any]) -> Tensor:
    """Pixels (h, w, 3) of images side by side, all of the size of the first, with a white line after each."""
    pictures = [load_image(image) for image in images]
    width = max(1, round(pictures[0].width * _HEIGHT / pictures[0].height))
    small = [picture.resize((width, _HEIGHT)) for picture in pictures]
    flat = [torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8).view(_HEIGHT, width, 3) for one in small]
    for part in flat[:-1]:
        part[:, -1] = 255
    return torch.cat(flat, 1)
