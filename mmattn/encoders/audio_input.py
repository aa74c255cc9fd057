"""Sounds of any kind (paths, bytes, arrays, tensors) read as mono waveforms at one sampling rate, whole or in pieces.

Files are read by libsndfile (WAV, FLAC, OGG, MP3, AIFF, CAF …) in pieces, so that a long one never lies in memory at
its own rate and with all its channels; channels are averaged, and the rate is changed by soxr.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from mmattn.encoders.media_files import as_list, is_array, open_binary, undecoded
from mmattn.errors import AudioError, check_float, check_int, import_extra

if TYPE_CHECKING:
    from soundfile import SoundFile

SAMPLING_RATE = 16_000
"""Samples in a second that models of speech expect."""
MAX_SECONDS = 7200.0
"""The longest sound that is read at once by default: 460 MB at 16 kHz."""

#: Largest sample: full scale is 1.
_SCALE = 2.0
#: Missing bytes from which a file counts as cut short: some writers count wrongly.
_SLACK = 64


def load_audio(
    source: object,
    sampling_rate: int = SAMPLING_RATE,
    *,
    source_rate: int | None = None,
    max_seconds: float = MAX_SECONDS,
) -> Tensor:
    """Read one sound as a mono waveform (samples,), float32 with full scale 1, at a sampling rate.

    Args:
        source: path, bytes, open binary file, array or tensor (samples,) or (channels, samples), or a value of an
            `Audio` column of `datasets`: a dict {"array": …, "sampling_rate": …} or {"bytes": …, "path": …}, or a
            decoder of torchcodec. Integers are scaled by their range.
        sampling_rate: samples in a second of the result.
        source_rate: samples in a second of an array; by default `sampling_rate`. Files say their own.
        max_seconds: longer sounds are refused; `stream_audio` reads them in pieces.

    Raises:
        AudioError: `source` is no sound, is damaged, cut short, empty, too long, or has NaN.
        ConfigError: a setting outside what is allowed.
        MissingExtraError: soundfile is not installed, or soxr, and they are needed.

    >>> load_audio(torch.zeros(2, 441), 16000, source_rate=44100).shape
    torch.Size([160])
    """
    check_float("max_seconds", max_seconds, at_least=0)
    pieces = list(_resampled(source, sampling_rate, source_rate, 10.0, max_seconds))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def stream_audio(
    source: object,
    sampling_rate: int = SAMPLING_RATE,
    *,
    source_rate: int | None = None,
    block: float = 10.0,
) -> Iterator[Tensor]:
    """Read one sound as pieces (samples,) of its waveform, which follow each other without a gap.

    Their concatenation is what `load_audio` gives. Only a piece of a file is in memory at once.

    Args:
        source: as for `load_audio`; or an iterable of arrays or tensors (samples,) or (channels, samples), the pieces
            of one sound as they arrive.
        sampling_rate: samples in a second of the result.
        source_rate: samples in a second of arrays; by default `sampling_rate`.
        block: seconds of a piece of a file.

    Yields:
        Pieces (samples,), float32.

    Raises:
        AudioError: as for `load_audio`, once the pieces before have been given.
        ConfigError: a setting outside what is allowed.
        MissingExtraError: soundfile is not installed, or soxr, and they are needed.
    """
    check_float("block", block, at_least=1e-3)
    return _resampled(source, sampling_rate, source_rate, block, math.inf)


def _resampled(
    source: object, sampling_rate: int, source_rate: int | None, block: float, max_seconds: float
) -> Iterator[Tensor]:
    check_int("sampling_rate", sampling_rate)
    with ExitStack() as stack:
        name, rate, pieces = _opened(source, sampling_rate if source_rate is None else source_rate, block, stack)
        change = None
        if rate != sampling_rate:
            change = import_extra("soxr", "audio").ResampleStream(rate, sampling_rate, 1, dtype="float32", quality="HQ")
        total = 0
        for piece in pieces:
            mono = _mono(piece, name, total / rate)
            total += len(mono)
            if total > max_seconds * rate:
                raise AudioError(
                    f"{name} is longer than {max_seconds:g} seconds; cut it, raise max_seconds, or read it in pieces "
                    "with stream_audio"
                )
            yield mono if change is None else torch.from_numpy(change.resample_chunk(mono.numpy()))
        if not total:
            raise AudioError(f"{name} has no samples")
        if change is not None:
            yield torch.from_numpy(change.resample_chunk(torch.zeros(0).numpy(), last=True))


def sound_list(sounds: object) -> list[object]:
    """Return one sound, an iterable of sounds, or an array (b, channels, samples) as a list."""
    return as_list(sounds, "sound", AudioError, batch_dims=3, single=(Mapping,))


def _opened(source: object, source_rate: int, block: float, stack: ExitStack) -> tuple[str, int, Iterator[Tensor]]:
    """Return the name of a sound in messages, its rate, and pieces (samples, channels) as they are stored."""
    source = undecoded(source)
    if hasattr(source, "get_all_samples"):
        samples = source.get_all_samples()
        source, source_rate = samples.data, samples.sample_rate
    if isinstance(source, Mapping):
        try:
            source_rate, array = operator.index(source["sampling_rate"]), source["array"]
        except (KeyError, TypeError) as error:
            raise AudioError(
                "a sound is a dict of 'array' and an int 'sampling_rate', or of 'bytes' and 'path'; got "
                f"{sorted(map(str, source))}"
            ) from error
        source = torch.tensor(array) if isinstance(array, list) else array
    if is_array(source):
        check_int("source_rate", source_rate)
        name, samples = _of_array(source)
        return name, source_rate, iter([samples])
    is_file = isinstance(source, (str, bytes, bytearray, memoryview)) or hasattr(source, "read")
    if isinstance(source, Iterable) and not is_file:
        return "the stream", source_rate, (_of_array(piece)[1] for piece in source)
    file, name = stack.enter_context(open_binary(source, "sound", AudioError))
    sound = stack.enter_context(_sound_file(file, name))
    return name, sound.samplerate, _file_pieces(sound, name, max(1, round(block * sound.samplerate)))


def _of_array(source: object) -> tuple[str, Tensor]:
    """Return the name of an array in messages, and its samples (samples, channels)."""
    if not is_array(source):
        raise AudioError(f"a piece of a sound was expected, got {type(source).__name__}; give an array or a tensor")
    name = f"the {'tensor' if isinstance(source, Tensor) else 'array'} {tuple(source.shape)}"
    try:
        samples = source.detach().cpu() if isinstance(source, Tensor) else torch.from_numpy(source.copy())
    except RuntimeError as error:  # on the meta device
        raise AudioError(f"{name} has no samples that can be read: {error}") from error
    except (TypeError, ValueError) as error:
        raise AudioError(f"{name} is {source.dtype}; give floats from -1 to 1, or int16 or int32") from error
    if samples.dim() not in (1, 2):
        raise AudioError(f"{name} is not one sound; give (samples,) or (channels, samples), several as a list")
    if samples.dim() == 2 and samples.shape[0] > samples.shape[1]:
        raise AudioError(f"{name} has more channels than samples; give (channels, samples)")
    if samples.dtype == torch.uint8:
        samples = (samples.float() - 128) / 128
    elif samples.dtype in (torch.int8, torch.int16, torch.int32):
        samples = samples.double() / -torch.iinfo(samples.dtype).min
    elif not samples.is_floating_point():
        raise AudioError(f"{name} is {samples.dtype}; give floats from -1 to 1, or int16 or int32")
    return name, (samples if samples.dim() == 2 else samples[None]).float().T


def _sound_file(file: BinaryIO, name: str) -> SoundFile:
    """Return the `SoundFile` of a file that is whole as far as its header says."""
    soundfile = import_extra("soundfile", "audio")
    if file.read(4) == b"OggS" and not _ends(file):
        raise AudioError(f"{name} is cut short: the last page of its Ogg stream is missing; fetch or copy it anew")
    file.seek(0)
    try:
        sound = soundfile.SoundFile(file)
    except soundfile.SoundFileError as error:
        raise AudioError(f"{name} cannot be read as a sound, or is cut short: {error}") from error
    for stated, actual in re.findall(r"(\d+) \(should be (\d+)\)", sound.extra_info):
        # Writers without the length state the largest one.
        if int(actual) + _SLACK < int(stated) < 2**31 - 1:
            raise AudioError(f"{name} is cut short: {actual} of {stated} bytes; fetch or copy it anew")
    return sound


def _ends(file: BinaryIO) -> bool:
    """Return True if an Ogg file (RFC 3533, section 6) ends with a whole page that is marked as the last."""
    # A page has a head of at most 282 bytes and 255 segments of 255.
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 65_307))
    tail = file.read()
    begin = tail.rfind(b"OggS")
    page = tail[begin:]
    if begin < 0 or len(page) < 27 or not page[5] & 4:
        return False
    return len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])


def _file_pieces(sound: SoundFile, name: str, length: int) -> Iterator[Tensor]:
    read = 0
    while True:
        try:
            piece = sound.read(length, dtype="float32", always_2d=True)
        except RuntimeError as error:
            raise AudioError(
                f"{name} is cut short after {read / sound.samplerate:.2f} s, or damaged: {error}"
            ) from error
        if not len(piece):
            break
        read += len(piece)
        yield torch.from_numpy(piece)
    if read < sound.frames < 2**62:
        raise AudioError(f"{name} is cut short: {read} of {sound.frames} samples; fetch or copy it anew")


def _mono(piece: Tensor, name: str, seconds: float) -> Tensor:
    """Check a piece (samples, channels) and return the mean of its channels."""
    if not torch.isfinite(piece).all():
        first = int((~torch.isfinite(piece).all(1)).nonzero()[0])
        raise AudioError(f"{name} has NaN or infinity, {seconds:.2f} s and {first} samples from its beginning")
    if piece.numel() and float(piece.abs().max()) > _SCALE:
        raise AudioError(
            f"{name} has samples up to {float(piece.abs().max()):g}, and full scale is 1; divide by the largest that "
            "is possible, or give int16"
        )
    return piece.mean(1)
