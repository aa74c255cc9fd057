"""Frames of videos at their times, upright and torn ones, and VideoEncoder: rows, segments, positions, streams."""

from __future__ import annotations

import io
import math
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from torch import nn

import mmattn
from mmattn.encoders import ImageEncoder, ImageProcessor, VideoEncoder, video
from mmattn.encoders.video import stream_frames
from mmattn.errors import ConfigError, MissingExtraError, VideoError

RATE = 10
WIDTH, HEIGHT = 64, 48


def picture(number: int) -> np.ndarray[Any, Any]:
    """A frame that says its number by its brightness, and up from down and left from right by its corners."""
    grey = np.full((HEIGHT, WIDTH, 3), 20 + 4 * number, np.uint8)
    grey[:16, :16] = (250, 0, 0)
    return grey


def filmed(count: int = 50, kind: str = "mp4", codec: str = "mpeg4", *, first: int = 0) -> bytes:
    """A video of so many frames, ten a second."""
    return film_of([picture(first + number) for number in range(count)], kind, codec, rate=RATE)


def film_of(
    frames: list[Any], kind: str, codec: str, form: str = "yuv420p", start: int = 0, aspect: Any = None, rate: int = 4
) -> bytes:
    """A video of frames, of which the first is shown after `start` others would have been."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = frames[0].shape[1], frames[0].shape[0], form
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgba" if pixels.shape[2] == 4 else "rgb24")
            frame = frame.reformat(format=form)
            frame.pts = number + start
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def number_of(image: Any) -> float:
    return (float(image[20:, 20:].mean()) - 20) / 4


@pytest.fixture(scope="module")
def film() -> bytes:
    return filmed()


class TinyEye(ImageEncoder):
    """Patches of 4 by 4 pixels of pictures of 12 by 8, by a random projection."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__(nn.Conv2d(3, 7, 4, stride=4), ImageProcessor((8, 12), resize="squash"), pooled=pooled)


@pytest.fixture(scope="module")
def eye() -> TinyEye:
    torch.manual_seed(3)
    return TinyEye()


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("webm", "libvpx"), ("mpegts", "mpeg2video")]
)
def test_frames_of_each_second(kind: str, codec: str, tmp_path: Path) -> None:
    path = tmp_path / "film"
    path.write_bytes(filmed(35, kind, codec))
    with open(path, "rb") as file:
        for source in (path, path.read_bytes(), file):
            frames = list(stream_frames(source, fps=2))
            assert [frame.time for frame in frames] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0], abs=0.002)
            # Every half a second 5 more; codecs lose a little of the brightness.
            assert [number_of(frame.image) for frame in frames] == pytest.approx(range(0, 35, 5), abs=1)


def test_a_long_video_is_never_in_memory_as_a_whole() -> None:
    """Frames come one by one, before it is known what follows."""
    data = filmed(50, "matroska")
    frames = stream_frames(data[: len(data) // 2])
    assert number_of(next(frames).image) == pytest.approx(0, abs=1)
    with pytest.raises(VideoError, match="cut short: 2"):
        list(frames)
    given = []

    def camera() -> Any:
        for number in range(9):
            given.append(number)
            yield number / 4, picture(number)

    live = stream_frames(camera(), fps=2)
    assert (next(live).time, given) == (0.0, [0, 1])
    assert [frame.time for frame in live] == [0.5, 1.0, 1.5, 2.0]


def test_a_memory_of_videos(eye: TinyEye, film: bytes) -> None:
    watch = VideoEncoder(eye, fps=2)
    memory = watch([film, filmed(12, first=9)], batch_size=4)
    assert eye.grid == (2, 3) and watch.dim == memory.dim == 7
    assert memory.lengths == [60, 18]
    assert memory.segments is not None and memory.sources is not None
    assert memory.segments[0].tolist() == [frame for frame in range(10) for _ in range(6)]
    assert [source["frame"] for source in memory.sources[0]] == memory.segments[0].tolist()
    assert memory.sources[1][11] == {"video": 1, "frame": 1, "time": 0.5, "patch": [1, 2]}
    assert memory.sources[1][18:] == [None] * 42
    frames = [frame.image for frame in stream_frames(film, fps=2)]
    assert torch.isfinite(memory.tokens).all()
    torch.testing.assert_close(memory.tokens[0], eye(frames).tokens.flatten(0, 1), atol=1e-6, rtol=1e-5)
    places = watch.positions(memory)
    times = [source["time"] for source in memory.sources[0][::6]]
    assert places[0].tolist() == [[time, row, column] for time in times for row in range(2) for column in range(3)]
    assert places.shape == (2, 60, 3) and not places[1, 18:].any()
    pooled = VideoEncoder(TinyEye(pooled=True), fps=0.5)(film)
    assert pooled.tokens.shape == (1, 3, 7) and pooled.segments is not None
    assert pooled.segments.tolist() == [[0, 1, 2]]
    assert VideoEncoder(eye).positions(pooled)[0, :, 1:].any() == torch.tensor(False)
    assert watch([]).tokens.shape == (0, 0, 7)


def test_frames_that_arrive_give_the_tokens_of_the_whole(eye: TinyEye, film: bytes) -> None:
    """Invariant 99."""
    watch = VideoEncoder(eye, fps=2)
    whole, stream, sources = watch(film), mmattn.MemoryStream(watch.dim, window=24), []
    for memory in watch.stream(film):
        stream.append(memory)
        assert memory.sources is not None and memory.length == 6
        sources += memory.sources[0]
    assert [sources] == whole.sources and stream.arrived == whole.length == 60
    torch.testing.assert_close(stream.memory().tokens, whole.tokens[:, -24:], atol=1e-6, rtol=1e-5)
    pairs = [(number / 10, picture(number)) for number in range(50)]
    live = [memory.tokens for memory in watch.stream(iter(pairs))]
    torch.testing.assert_close(torch.cat(live, 1), watch(pairs).tokens, atol=1e-6, rtol=1e-5)


def test_the_fingerprint_is_of_the_images_and_the_times(eye: TinyEye) -> None:
    other = TinyEye()
    prints = {
        VideoEncoder(*args, **kw).fingerprint for args, kw in (((eye,), {}), ((eye,), {"fps": 2}), ((other,), {}))
    }
    assert len(prints) == 3 and eye.fingerprint not in prints


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("webm", "libvpx"), ("avi", "mpeg4")]
)
@pytest.mark.parametrize("share", [0.01, 0.6])
def test_a_video_that_is_cut_short(kind: str, codec: str, share: float, eye: TinyEye) -> None:
    """Invariant 102."""
    data = filmed(50, kind, codec)
    with pytest.raises(VideoError, match="video 0: the bytes .*cut short"):
        VideoEncoder(eye)(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", r"the bytes is empty \(0 bytes\)"),
        (b"<html>not here</html>", "the bytes cannot be read as a video"),
        ("nowhere.mp4", "there is no file 'nowhere.mp4'"),
        ("/", "'/' is a folder"),
        ("https://example.org/a.mp4", "is an address, and nothing is downloaded"),
        (3.5, "a video was expected, got float; give a path"),
        ([], "the stream has no frames"),
        ([1, 2], "a frame is a pair of its time in seconds and an image, got int"),
        (
            [(0.0, np.zeros((4, 4))), (0.0, np.zeros((4, 4)))],
            "the times of the stream must increase, got 0 s after 0 s",
        ),
        ([(0.0, np.full((4, 4), math.nan))], "picture 0: .*nan"),
    ],
)
def test_what_is_no_video_is_said(source: Any, words: str, eye: TinyEye) -> None:
    """Invariant 102."""
    with pytest.raises(VideoError, match=f"video 0: .*{words}"):
        VideoEncoder(eye)([source])


def test_a_sound_is_no_video(tmp_path: Path, eye: TinyEye) -> None:
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.wav", np.zeros(1000), 16000)
    (tmp_path / "empty.mp4").touch()
    with pytest.raises(VideoError, match="a.wav' has no pictures, though it may have sound"):
        VideoEncoder(eye)(tmp_path / "a.wav")
    with pytest.raises(VideoError, match=r"empty.mp4' is empty \(0 bytes\)"):
        VideoEncoder(eye)(tmp_path / "empty.mp4")


def test_what_else_is_refused(eye: TinyEye, film: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limit, pytest.raises(VideoError, match="frames of 64 x 48 .*more than 3000; shrink"):
        limit.setattr(video, "MAX_PIXELS", 3000)
        VideoEncoder(eye)(film)
    with pytest.raises(ConfigError, match="fps must be"):
        next(stream_frames(film, fps=0))
    with pytest.raises(ConfigError, match="images must be an encoder of images, got Conv2d"):
        VideoEncoder(nn.Conv2d(3, 3, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no sources with the positions"):
        VideoEncoder(eye).positions(mmattn.Memory(torch.zeros(1, 2, 7)))
    with pytest.raises(VideoError, match="a video was expected, got Tensor"):
        VideoEncoder(eye)(torch.zeros(3, 3))
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"mmattn\[video\]"):
        next(stream_frames(film))


def turned(film: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """A film with a display matrix (a, b, c, d) in the header of its track."""
    at = film.find(b"tkhd") + 44
    a, b, c, d = (part << 16 for part in matrix)
    return film[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + film[at + 36 :]


@pytest.mark.parametrize(
    ("matrix", "change"),
    {
        (1, 0, 0, 1): lambda x: x,
        (0, 1, -1, 0): lambda x: np.rot90(x, -1),
        (-1, 0, 0, -1): lambda x: np.rot90(x, 2),
        (0, -1, 1, 0): lambda x: np.rot90(x),
        (-1, 0, 0, 1): np.fliplr,
        (1, 0, 0, -1): np.flipud,
        (0, 1, 1, 0): lambda x: x.swapaxes(0, 1),
        (0, -1, -1, 0): lambda x: np.rot90(x.swapaxes(0, 1), 2),
    }.items(),
)
def test_frames_are_seen_as_players_show_them(matrix: tuple[int, int, int, int], change: Any) -> None:
    """Invariant 136. Turned and mirrored, by the whole display matrix."""
    film = filmed(2)
    plain, seen = (next(stream_frames(one)).image for one in (film, turned(film, matrix)))
    assert np.array_equal(seen, change(plain))


@pytest.mark.parametrize(
    ("kind", "codec"), [("matroska", "mpeg4"), ("webm", "libvpx"), ("mp4", "mpeg4"), ("mpegts", "mpeg4")]
)
@pytest.mark.parametrize("start", [0, 40])
def test_a_first_frame_that_is_shown_late(kind: str, codec: str, start: int) -> None:
    """Invariant 136. Times are counted from it, in every container."""
    film = film_of([np.full((32, 32, 3), 40 * n, np.uint8) for n in range(6)], kind, codec, start=start)
    assert [frame.time for frame in stream_frames(film)] == pytest.approx([n / 4 for n in range(6)], abs=0.01)
    grey = [float(frame.image.mean()) for frame in stream_frames(film, fps=2)]
    assert grey == pytest.approx([0, 80, 160], abs=12)


def test_pixels_that_are_no_squares_and_frames_that_are_seen_through() -> None:
    """Invariant 136. A frame is as wide as it is shown, and white where nothing is, as a picture is."""
    grey = np.full((32, 32, 3), 90, np.uint8)
    wide = next(stream_frames(film_of([grey] * 2, "mp4", "mpeg4", aspect=Fraction(2, 1)))).image
    assert wide.shape == (32, 64, 3)
    clear = np.dstack([grey, np.where(np.arange(32) < 16, 0, 255).astype(np.uint8)[None].repeat(32, 0)])
    seen = next(stream_frames(film_of([clear] * 2, "mov", "png", "rgba"))).image
    assert (seen[:, :16] == 255).all() and (seen[:, 16:] == 90).all()
