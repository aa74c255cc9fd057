"""Videos as a memory: frames with their times, each through an encoder of images."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders.base import FrozenEncoder, ImageEncoder
from mmattn.encoders.frames import Frame, as_videos, stream_frames
from mmattn.encoders.images import MAX_PIXELS
from mmattn.errors import ConfigError, ImageError, VideoError, check_float, check_int
from mmattn.memory import Memory
from mmattn.progress import batches


class VideoEncoder(FrozenEncoder):
    """Frames of videos, each encoded by an encoder of images, as a memory (b, m, e) with the time of each.

    Segments number the frames, for masks by segments (`visible_segments`). `positions(memory)` gives time, row and
    column of each token, for `positions.Rotary(k, axes=3)`.

    Args:
        images: the encoder of the frames.
        fps: frames of each second; None for all.
        count: frames of the whole video, in place of `fps`.
        max_frames: videos that give more are refused.

    Attributes:
        dim: width e of the memory: that of the encoder of images.
        images: the encoder of the frames.

    Raises:
        ConfigError: a setting outside what is allowed.

    >>> from mmattn.encoders import TorchvisionEncoder
    >>> encoder = VideoEncoder(TorchvisionEncoder("squeezenet1_1", size=32, pooled=True), fps=2)
    >>> memory = encoder([[(time / 10, torch.rand(3, 40, 40)) for time in range(11)]])
    >>> memory, memory.segments.tolist(), memory.sources[0][1]
    (Memory(b=1, m=3, e=512, float32, segments, sources), [[0, 1, 2]], {'video': 0, 'frame': 1, 'time': 0.5})
    """

    def __init__(
        self, images: ImageEncoder, *, fps: float | None = 1.0, count: int | None = None, max_frames: int = 1000
    ) -> None:
        if not isinstance(images, ImageEncoder):
            raise ConfigError(f"images must be an encoder of images, got {type(images).__name__}")
        self.count = None if count is None else check_int("count", count)
        self.fps = None if fps is None or count is not None else check_float("fps", fps, at_least=1e-6)
        self.max_frames = check_int("max_frames", max_frames)
        settings = {"encoder": "video", "fps": self.fps, "count": self.count}
        super().__init__(images, settings, images.device)
        self.dim = images.dim

    @property
    def images(self) -> ImageEncoder:
        """The encoder of the frames."""
        return self.model  # type: ignore[return-value]

    def forward(
        self, videos: Any, *, batch_size: int = 32, progress: bool = False, max_pixels: int = MAX_PIXELS
    ) -> Memory:
        """Return the memory (b, m, e) of b videos, padded, computed without gradients; `encode` is the same.

        `sources` of the memory gives video, frame, time from the first frame, and patch: {"video": 0, "frame": 2,
        "time": 2.0, "patch": [row, column]}.

        Args:
            videos: one video or a list of them: paths, bytes, open binary files, or lists of pairs of a time in seconds
                and an image.
            batch_size: frames that pass the network at once, and are in memory at once.
            progress: show the progress on stderr.
            max_pixels: videos with larger frames are refused.

        Raises:
            VideoError: a video cannot be read; the message says which one.
            ConfigError: `batch_size` is no positive int.
        """
        check_int("batch_size", batch_size)
        items, rows = as_videos(videos), []
        for number in batches(len(items), 1, "encoding", progress):
            try:
                rows.append(self._whole(items[number], number, batch_size, max_pixels))
            except (VideoError, ImageError) as error:
                raise VideoError(f"video {number}: {error}") from error
        return Memory.stack(rows) if rows else self._padded([], [])

    encode = forward

    def stream(self, video: Any, *, max_pixels: int = MAX_PIXELS) -> Iterator[Memory]:
        """Yield the memory of one video frame by frame, as it arrives; the tokens are those of the whole video.

        Args:
            video: as in `forward`, or an iterable of pairs of a time in seconds and an image, as a camera gives them.
            max_pixels: videos with larger frames are refused.

        Yields:
            Memories (1, n, e) of one frame each, for `MemoryStream.append`.

        Raises:
            VideoError: it cannot be read.
        """
        for number, frame in enumerate(self._frames(video, max_pixels)):
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
            raise ConfigError("this memory has no sources with the positions of its tokens: give one of this encoder")
        places = [
            [(0.0, 0, 0) if source is None else (source["time"], *source.get("patch", (0, 0))) for source in row]
            for row in memory.sources
        ]
        return torch.tensor(places, dtype=torch.float32, device=memory.device).view(memory.batch, memory.length, 3)

    def _frames(self, video: Any, max_pixels: int) -> Iterator[Frame]:
        frames = stream_frames(video, fps=self.fps, count=self.count, max_pixels=max_pixels)
        for number, frame in enumerate(frames):
            if number >= self.max_frames:
                raise VideoError(
                    f"more than {self.max_frames} frames up to {frame.time:.2f} s; lower fps, or raise max_frames"
                )
            yield frame

    def _whole(self, video: Any, number: int, batch_size: int, max_pixels: int) -> Memory:
        frames = self._frames(video, max_pixels)
        parts: list[Memory] = []
        while chunk := list(itertools.islice(frames, batch_size)):
            parts.append(self._encoded(chunk, number, sum(part.length for part in parts) // self.images.length))
        memory = Memory.cat([Memory(part.tokens, sources=part.sources) for part in parts])
        segments = torch.arange(memory.length, device=memory.device)[None] // self.images.length
        return Memory(memory.tokens, segments=segments, sources=memory.sources)

    def _encoded(self, frames: Iterable[Frame], video: int, first: int) -> Memory:
        """Encode frames, numbered from `first`, as one row (1, n × m, e)."""
        frames = list(frames)
        memory = self.images([frame.image for frame in frames], batch_size=len(frames))
        assert memory.sources is not None
        sources = [
            {"video": video, "frame": first + i, "time": frame.time} | {k: v for k, v in source.items() if k != "image"}
            for i, (frame, row) in enumerate(zip(frames, memory.sources, strict=True))
            for source in row
        ]
        return Memory(memory.tokens.flatten(0, 1)[None], sources=[sources])

    def _described(self) -> dict[str, Any]:
        return {**self.settings, "images": self.images._described()}

    def _weights(self) -> dict[str, Tensor]:
        return self.images._weights()

    def extra_repr(self) -> str:
        return f"dim={self.dim}, fps={self.fps}, count={self.count}"
