"""Videos as a memory: frames, decoded one by one by FFmpeg (PyAV), with their times, each through an image encoder."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import torch
from torch import Tensor

from mmattn.encoders.base import FrozenEncoder, as_list, is_array, open_binary, undecoded
from mmattn.encoders.images import MAX_PIXELS, ImageEncoder
from mmattn.errors import ConfigError, ImageError, VideoError, check_float, check_int, import_extra
from mmattn.memory import Memory
from mmattn.progress import tracked

if TYPE_CHECKING:
    from av import VideoFrame, VideoStream
    from av.container import InputContainer
    from numpy import ndarray

#: Missing length from which a video counts as cut short: as a share, and in seconds.
_SLACK = (0.1, 0.5)


class VideoEncoder(FrozenEncoder):
    """Frames of videos, each encoded by an encoder of images, as a memory (b, m, e) with the time of each.

    Segments number the frames, for masks by segments (`visible_segments`). `positions(memory)` gives time, row and
    column of each token, for `positions.Rotary(k, axes=3)`.

    Args:
        images: the encoder of the frames.
        fps: frames of each second; None for all.

    Attributes:
        dim: width e of the memory: that of the encoder of images.
        model: the encoder of the frames.

    Raises:
        ConfigError: a setting that is not allowed.

    >>> from mmattn.encoders import TorchvisionEncoder
    >>> encoder = VideoEncoder(TorchvisionEncoder("squeezenet1_1", size=32, pooled=True), fps=2)
    >>> memory = encoder([[(time / 10, torch.rand(3, 40, 40)) for time in range(11)]])
    >>> memory, memory.segments.tolist(), memory.sources[0][1]
    (Memory(b=1, m=3, e=512, float32, segments, sources), [[0, 1, 2]], {'video': 0, 'frame': 1, 'time': 0.5})
    """

    model: ImageEncoder
    _shown = ("dim", "fps")

    def __init__(self, images: ImageEncoder, *, fps: float | None = 1.0) -> None:
        if not isinstance(images, ImageEncoder):
            raise ConfigError(f"images must be an encoder of images, got {type(images).__name__}")
        self.fps = None if fps is None else check_float("fps", fps, at_least=1e-6)
        super().__init__(images, {"encoder": "video", "fps": self.fps}, images.device)
        self.dim = images.dim

    def forward(self, videos: object, *, batch_size: int = 32, progress: bool = False) -> Memory:
        """Return the memory (b, m, e) of b videos, padded, computed without gradients; `encode` is the same.

        `sources` of the memory gives video, frame, time from the first frame, and patch: {"video": 0, "frame": 2,
        "time": 2.0, "patch": [row, column]}.

        Args:
            videos: one video or a list of them: paths, bytes, open binary files, values of a `Video` column of
                `datasets`, or lists of pairs of a time in seconds and an image.
            batch_size: frames that pass the network at once, and are in memory at once.
            progress: show the progress on stderr.

        Raises:
            VideoError: a video cannot be read; the message says which one.
            ConfigError: `batch_size` is not a positive int.
        """
        check_int("batch_size", batch_size)
        items, rows = as_list(videos, "video", VideoError, batch_dims=0), []
        if items and isinstance(items[0], tuple):
            items = [items]
        for number in tracked(len(items), "encoding", progress):
            try:
                rows.append(self._whole(items[number], number, batch_size))
            except (VideoError, ImageError) as error:
                raise VideoError(f"video {number}: {error}") from error
        return Memory.stack(rows) if rows else self._padded([], [])

    encode = forward

    def stream(self, video: object) -> Iterator[Memory]:
        """Yield the memory of one video frame by frame, as it arrives; the tokens are those of the whole video.

        Args:
            video: as in `forward`, or an iterable of pairs of a time in seconds and an image, as a camera gives them.

        Yields:
            Memories (1, n, e) of one frame each, for `MemoryStream.append`.

        Raises:
            VideoError: it cannot be read.
        """
        for number, frame in enumerate(stream_frames(video, fps=self.fps)):
            yield self._encoded([frame], 0, number)

    def positions(self, memory: Memory) -> Tensor:
        """Return the position (time in seconds, row, column) of each token of a memory of this encoder, (b, m, 3).

        Rows and columns are 0 for pooled frames, and all three in padding.

        Args:
            memory: of `forward` or `stream`.

        Raises:
            ConfigError: a memory without the sources of frames.
        """
        if memory.sources is None:
            raise ConfigError(
                "this memory has no sources with the positions of its tokens: give a memory of this encoder"
            )
        places = [
            [(0.0, 0, 0) if source is None else (source["time"], *source.get("patch", (0, 0))) for source in row]
            for row in memory.sources
        ]
        return torch.tensor(places, dtype=torch.float32, device=memory.device).view(memory.batch, memory.length, 3)

    def _whole(self, video: object, number: int, batch_size: int) -> Memory:
        frames = stream_frames(video, fps=self.fps)
        parts: list[Memory] = []
        while chunk := list(itertools.islice(frames, batch_size)):
            parts.append(self._encoded(chunk, number, batch_size * len(parts)))
        memory = Memory.cat(parts)
        segments = torch.arange(memory.length, device=memory.device)[None] // self.model.length
        return Memory(memory.tokens, segments=segments, sources=memory.sources)

    def _encoded(self, frames: list[Frame], video: int, first: int) -> Memory:
        """Encode frames, numbered from `first`, as one row (1, n × m, e)."""
        memory = self.model([frame.image for frame in frames], batch_size=len(frames))
        assert memory.sources is not None
        sources = [
            {"video": video, "frame": first + i, "time": frame.time} | {k: v for k, v in source.items() if k != "image"}
            for i, (frame, row) in enumerate(zip(frames, memory.sources, strict=True))
            for source in row
        ]
        return Memory(memory.tokens.flatten(0, 1)[None], sources=[sources])

    def _described(self) -> dict[str, object]:
        return {**self.settings, "images": self.model._described()}

    def _weights(self) -> dict[str, Tensor]:
        return self.model._weights()


class Frame(NamedTuple):
    """A picture of a video, of any kind that `load_image` reads, and its time in seconds from the first."""

    time: float
    image: object


def stream_frames(source: object, *, fps: float | None = None) -> Iterator[Frame]:
    """Yield frames of one video in their order, upright, each as soon as it is decoded; arguments as for encoders.

    With `fps` these are the frames on display at the requested times, each once: a video with fewer frames gives all of
    them.

    >>> [frame.time for frame in stream_frames([(0.0, "a"), (0.4, "b"), (0.6, "c"), (1.1, "d")], fps=2)]
    [0.0, 0.4, 0.6, 1.1]
    """
    if fps is not None:
        check_float("fps", fps, at_least=1e-6)
    # A little late, so that the rounding of times does not choose the frame before.
    count, late, previous, apart = 0, 1e-6, None, 0.0
    for frame in _frames(source):
        if fps is None:
            yield frame
        elif previous is not None:
            apart = frame.time - previous.time
            # The previous frame was on display up to here.
            if count / fps + late < frame.time:
                yield previous
            while count / fps + late < frame.time:
                count += 1
        previous = frame
    if fps is not None and previous is not None:
        end = max(previous.time + apart - 2 * late, previous.time + late)
        if count / fps < end:
            yield previous


def _frames(source: object) -> Iterator[Frame]:
    """Yield all frames of a video."""
    with contextlib.ExitStack() as stack:
        source = undecoded(source)
        is_file = isinstance(source, (str, bytes, bytearray, memoryview)) or hasattr(source, "read")
        pairs: Iterable[object]
        if hasattr(source, "get_frame_at"):
            frames = map(source.get_frame_at, range(len(source)))  # type: ignore[arg-type]
            name, pairs = "the video", ((float(frame.pts_seconds), frame.data) for frame in frames)
        elif isinstance(source, Iterable) and not is_file and not is_array(source):
            name, pairs = "the stream", source
        else:
            file, name = stack.enter_context(open_binary(source, "video", VideoError))
            pairs = _decoded(file, name)
        first, last = 0.0, -math.inf
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], (int, float)):
                raise VideoError(f"a frame is a pair of its time in seconds and an image, got {type(pair).__name__}")
            time, image = pair
            if time <= last:
                raise VideoError(f"the times of {name} must increase, got {time:g} s after {last:g} s")
            first = time if math.isinf(last) else first
            last = time
            yield Frame(round(time - first, 6), image)
        if math.isinf(last):
            raise VideoError(f"{name} has no frames")


def _decoded(file: BinaryIO, name: str) -> Iterator[tuple[float, object]]:
    """Yield the time and the pixels of each frame."""
    av = import_extra("av", "video")
    errors = (av.error.FFmpegError, OSError, ValueError, LookupError)
    try:
        # A playlist could name other files or addresses.
        container = av.open(file, options={"protocol_whitelist": "file,pipe"})
    except errors as error:
        raise VideoError(f"{name} cannot be read as a video, or is cut short: {error}") from error
    with container:
        if not container.streams.video:
            raise VideoError(f"{name} has no pictures, though it may have sound")
        stream = container.streams.video[0]
        if stream.width * stream.height > MAX_PIXELS:
            raise VideoError(
                f"{name} has frames of {stream.width} x {stream.height} pixels, more than {MAX_PIXELS}; shrink it"
            )
        frames, first, last = container.decode(stream), math.inf, -math.inf
        while True:
            try:
                frame = next(frames, None)
            except errors as error:
                raise VideoError(
                    f"{name} is damaged or cut short after {max(last - first, 0):.2f} s: {error}"
                ) from error
            if frame is None:
                break
            if frame.time is None:
                raise VideoError(f"{name} has no times of its frames; convert it first")
            # Broken clocks repeat a time now and then; these frames are left out.
            if frame.time > last:
                first, last = min(first, frame.time), frame.time
                yield last, _upright(_square(frame, stream.sample_aspect_ratio))
        seconds = last - first + 1 / float(stream.average_rate or math.inf)
        duration = _duration(container, stream, av.time_base)
    if last >= first and seconds + max(_SLACK[1], _SLACK[0] * duration) < duration:
        raise VideoError(f"{name} is cut short: {seconds:.2f} of {duration:.2f} s; fetch or copy it anew")


def _duration(container: InputContainer, stream: VideoStream, time_base: int) -> float:
    """Return the seconds that the header states; 0 where it states none."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is None:
        return 0.0
    # That of Matroska counts from 0, not from the first frame.
    late = stream.start_time if "matroska" in container.format.name else None
    return float(container.duration / time_base - (late or 0) * (stream.time_base or 0))


def _square(frame: VideoFrame, aspect: Fraction | None) -> VideoFrame:
    """Return the frame with square pixels; `aspect` is the width of a pixel divided by its height."""
    width = round(frame.width * aspect) if aspect else frame.width
    if width == frame.width or not 0 < width * frame.height <= MAX_PIXELS:
        return frame
    return frame.reformat(width=width)


def _upright(frame: VideoFrame) -> ndarray:
    numpy = import_extra("numpy", "video")
    if any(component.is_alpha for component in frame.format.components):
        rgba = frame.to_ndarray(format="rgba").astype(numpy.uint16)
        pixels = ((rgba[..., :3] * rgba[..., 3:] + 255 * (255 - rgba[..., 3:]) + 127) // 255).astype(numpy.uint8)
    else:
        pixels = frame.to_ndarray(format="rgb24")
    data = next((side for side in frame.side_data if side.type.name == "DISPLAYMATRIX"), None)
    if data is None:
        return pixels
    # x' = a x + c y and y' = b x + d y, with y downwards (ISO 14496-12, 6.2.2); to the nearest quarter turn.
    a, b, _, c, d = numpy.frombuffer(bytes(data), numpy.int32)[:5].tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return numpy.ascontiguousarray(pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])
