"""Frames of videos with their times, decoded one by one by FFmpeg (PyAV), so that long videos fit in memory."""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mmattn.encoders.images import MAX_PIXELS
from mmattn.errors import ConfigError, VideoError, check_float, check_int, import_extra

_ACCEPTED = "a path, bytes, an open binary file, or pairs of a time in seconds and an image"
#: Missing length from which a video counts as cut short: as a share, and in seconds.
_SLACK = (0.1, 0.5)


@dataclass(frozen=True)
class Frame:
    """A picture of a video.

    Args:
        time: in seconds from the first frame.
        image: of any kind that `load_image` reads.
    """

    time: float
    image: Any


def stream_frames(
    source: Any, *, fps: float | None = None, count: int | None = None, max_pixels: int = MAX_PIXELS
) -> Iterator[Frame]:
    """Yield frames of one video in their order, upright, each as soon as it is decoded.

    With `fps` or `count` these are the frames on display at the requested times, each once: a video with fewer frames
    gives all of them.

    Args:
        source: path, bytes or open binary file, or an iterable of (time in seconds, image) as they arrive.
        fps: frames of each second, by time; None for all.
        count: frames of the whole video in place of `fps`, from the middles of equal parts.
        max_pixels: videos with larger frames are refused.

    Yields:
        Frames with increasing times.

    Raises:
        VideoError: `source` is no video, has no frames, is damaged or cut short, or is larger than `max_pixels`.
        ConfigError: both `fps` and `count`, or a setting outside what is allowed.
        MissingExtraError: PyAV is not installed, and it is needed.

    >>> [frame.time for frame in stream_frames([(0.0, "a"), (0.4, "b"), (0.6, "c"), (1.1, "d")], fps=2)]
    [0.0, 0.4, 0.6, 1.1]
    """
    if fps is not None and count is not None:
        raise ConfigError("give fps or count, not both: so many frames a second, or so many of the whole video")
    if fps is not None and check_float("fps", fps, at_least=0) == 0:
        raise ConfigError("fps must be above 0, got 0")
    if count is not None:
        check_int("count", count)
    video = _Source(source, max_pixels)
    if count is not None and video.duration is None:
        raise VideoError(f"{video.name} has no duration in its header: give fps in place of count")
    times = _times(fps, count, video.duration)
    time, shown = next(times, math.inf), None
    for frame in video.frames():
        if fps is None and count is None:
            yield frame
        # The previous frame was on display up to here.
        if shown is not None and time < frame.time:
            yield shown
            while time < frame.time:
                time = next(times, math.inf)
        shown = frame
    if shown is None:
        raise VideoError(f"{video.name} has no frames")
    if time - 1e-6 <= shown.time or time < (video.duration or 0.0):
        yield shown


def as_videos(videos: Any) -> list[Any]:
    """Return one video or an iterable of videos as a list."""
    if isinstance(videos, (str, bytes, bytearray, memoryview, os.PathLike)) or hasattr(videos, "read"):
        return [videos]
    if isinstance(videos, Iterable) and not hasattr(videos, "shape"):
        items = list(videos)
        return [items] if items and isinstance(items[0], tuple) else items
    raise VideoError(f"videos were expected, got {type(videos).__name__}; give {_ACCEPTED}, or a list of these")


def _times(fps: float | None, count: int | None, duration: float | None) -> Iterator[float]:
    """Yield the requested times; none if every frame is requested."""
    if count is not None and duration is not None:
        yield from ((part + 0.5) * duration / count for part in range(count))
    elif fps is not None:
        # A little late, so that the rounding of times does not choose the frame before.
        yield from (number / fps + 1e-6 for number in itertools.count())


class _Source:
    """An open video."""

    def __init__(self, source: Any, max_pixels: int) -> None:
        self.container: Any = None
        self.duration: float | None = None
        self.max_pixels = check_int("max_pixels", max_pixels)
        if isinstance(source, (str, os.PathLike)):
            path = os.fsdecode(source)
            self.name = repr(path if len(path) <= 200 else path[:200] + "…")
            self._check_path(path)
            self._open(path)
        elif isinstance(source, (bytes, bytearray, memoryview)):
            self.name = "the bytes"
            self._open(io.BytesIO(bytes(source)))
        elif hasattr(source, "read"):
            self.name = "the file"
            if hasattr(source, "seekable") and source.seekable():
                source.seek(0)
            self._open(source)
        elif isinstance(source, Iterable) and not hasattr(source, "shape"):
            self.name, self.pairs = "the stream", source
            if isinstance(source, (list, tuple)) and source and all(isinstance(pair, tuple) for pair in source):
                self.duration = 2 * source[-1][0] - source[-2][0] if len(source) > 1 else source[-1][0]
        else:
            raise VideoError(f"a video was expected, got {type(source).__name__}; give {_ACCEPTED}")

    def frames(self) -> Iterator[Frame]:
        """Yield the frames, their times counted from the first."""
        first: float | None = None
        last = -math.inf
        for time, image in self._decoded() if self.container is not None else self._pairs():
            first = time if first is None else first
            if time - first <= last:
                raise VideoError(f"the times of {self.name} must increase, got {time:g} s after {last + first:g} s")
            last = time - first
            yield Frame(round(last, 6), image)

    def _pairs(self) -> Iterator[tuple[float, Any]]:
        for pair in self.pairs:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], (int, float)):
                raise VideoError(f"a frame is a pair of its time in seconds and an image, got {type(pair).__name__}")
            yield pair

    def _check_path(self, path: str) -> None:
        if path.lower().startswith(("http://", "https://", "data:", "s3://", "gs://", "rtsp://", "rtmp://")):
            raise VideoError(f"{path[:80]!r} is an address, and nothing is downloaded here; give the path of a file")
        if os.path.isdir(path):
            raise VideoError(f"{self.name} is a folder; give the paths of the videos in it")
        if not os.path.isfile(path):
            raise VideoError(f"there is no file {self.name}")
        if not os.path.getsize(path):
            raise VideoError(f"{self.name} is empty (0 bytes), no video")

    def _open(self, file: Any) -> None:
        av = import_extra("av", "video")
        try:
            # A playlist could name other files or addresses.
            self.container = av.open(file, options={"protocol_whitelist": "file,pipe"})
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise VideoError(f"{self.name} cannot be read as a video, or is cut short: {_words(error)}") from error
        if not self.container.streams.video:
            self.container.close()
            raise VideoError(f"{self.name} has no pictures, though it may have sound")
        stream = self.container.streams.video[0]
        if stream.width * stream.height > self.max_pixels:
            self.container.close()
            raise VideoError(
                f"{self.name} has frames of {stream.width} x {stream.height} pixels, more than {self.max_pixels}; "
                "shrink it first, or raise max_pixels"
            )
        if stream.duration is not None and stream.time_base is not None:
            self.duration = float(stream.duration * stream.time_base)
        elif self.container.duration is not None:
            self.duration = self.container.duration / av.time_base
            if "matroska" in self.container.format.name and stream.start_time is not None:
                self.duration -= float(stream.start_time * stream.time_base)  # counted from 0, not from the first frame

    def _square(self, frame: Any, aspect: Any) -> Any:
        """Return the frame with square pixels; `aspect` is the width of a pixel divided by its height."""
        width = round(frame.width * aspect) if aspect else frame.width
        if width == frame.width or not 0 < width * frame.height <= self.max_pixels:
            return frame
        return frame.reformat(width=width)

    def _decoded(self) -> Iterator[tuple[float, Any]]:
        av = import_extra("av", "video")
        number, first, last = 0, 0.0, 0.0
        with self.container:
            stream = self.container.streams.video[0]
            rate = float(stream.average_rate or 0) or None
            frames = self.container.decode(stream)
            while True:
                try:
                    frame = next(frames, None)
                except (av.error.FFmpegError, OSError, ValueError, LookupError) as error:
                    raise VideoError(
                        f"{self.name} is damaged or cut short after {last - first:.2f} s: {_words(error)}"
                    ) from error
                if frame is None:
                    break
                if frame.time is None and rate is None:
                    raise VideoError(f"{self.name} has no times of its frames; convert it first")
                time = number / rate if frame.time is None and rate is not None else float(frame.time)
                if number and time <= last:
                    # Broken clocks repeat a time now and then; these frames are left out.
                    continue
                first = time if not number else first
                number, last = number + 1, time
                yield time, _upright(self._square(frame, stream.sample_aspect_ratio))
        seconds = last - first + (1 / rate if rate else 0.0)
        if self.duration is not None and number and seconds + max(_SLACK[1], _SLACK[0] * self.duration) < self.duration:
            raise VideoError(f"{self.name} is cut short: {seconds:.2f} of {self.duration:.2f} s; fetch or copy it anew")


def _upright(frame: Any) -> Any:
    numpy = import_extra("numpy", "video")
    if any(component.is_alpha for component in frame.format.components):
        rgba = frame.to_ndarray(format="rgba").astype(numpy.uint16)
        pixels = ((rgba[..., :3] * rgba[..., 3:] + 255 * (255 - rgba[..., 3:]) + 127) // 255).astype(numpy.uint8)
    else:
        pixels = frame.to_ndarray(format="rgb24")
    data = next((one for one in frame.side_data if one.type.name == "DISPLAYMATRIX"), None)
    if data is None:
        return pixels
    # x' = a x + c y and y' = b x + d y, with y downwards (ISO 14496-12, 6.2.2); to the nearest quarter turn.
    a, b, _, c, d = numpy.frombuffer(bytes(data), numpy.int32)[:5].tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return numpy.ascontiguousarray(pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])


def _words(error: BaseException) -> str:
    text: str = getattr(error, "strerror", None) or str(error)
    return text
