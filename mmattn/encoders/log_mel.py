"""Log-mel energies of sounds as a memory, without any weights: what speech models read, as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.encoders.audio_input import MAX_CLIPPED, MAX_SECONDS, SAMPLING_RATE, as_sounds, load_sounds, stream_audio
from mmattn.encoders.base import FrozenEncoder
from mmattn.errors import AudioError, ConfigError, check_choice, check_float, check_int
from mmattn.memory import Memory
from mmattn.progress import batches

_NORMALIZATIONS = ("fixed", "whisper", "mean_std")
#: Of the power; below it is silence.
_FLOOR = 1e-10
#: Frames that are transformed at once: 40 s, some 100 MB.
_BLOCK = 4096


class LogMelEncoder(FrozenEncoder):
    """Log-mel energies of sounds as a memory (b, m, e), one token for each `frames_per_token` frames.

    A frame is the power spectrum of `window` seconds under a Hann window, summed by `n_mels` triangles on the mel
    scale, as a decimal logarithm. With the defaults these are the features of Whisper (arXiv 2212.04356, section 2.2)
    at 40 ms a token, but that frames are not centred: frame i begins at i × `hop`, so that it needs nothing from
    before. The last token is filled up with silence.

    Args:
        n_mels: bands.
        frames_per_token: frames side by side in one token.
        sampling_rate: samples in a second; sounds at other rates are resampled.
        window: seconds of a frame.
        hop: seconds from one frame to the next.
        low: frequency in Hz where the first band begins.
        high: frequency in Hz where the last band ends; by default half the sampling rate.
        mel_scale: "slaney", whose bands are scaled to one area, or "htk", whose bands are scaled to one height.
        normalization: "fixed" for (log10 + 4) / 4; "whisper" for the same with what is more than 8 decades below the
            loudest band of the sound raised to there; "mean_std" for mean 0 and deviation 1 of each band over the
            sound. Only "fixed" can be streamed.
        device: where it is computed, by default the CPU.

    Attributes:
        dim: width e of the memory: n_mels × frames_per_token.
        sampling_rate: as given.
        token_seconds: from the beginning of one token to that of the next.

    Raises:
        ConfigError: a setting outside what is allowed, or so many bands that one of them has no frequency.

    >>> ear = LogMelEncoder(n_mels=40)
    >>> memory = ear([torch.zeros(16000), torch.zeros(4000)])
    >>> memory.tokens.shape, memory.lengths, memory.sources[1][1]
    (torch.Size([2, 25, 160]), [25, 7], {'audio': 1, 'start': 0.04, 'end': 0.08})
    """

    def __init__(
        self,
        n_mels: int = 80,
        frames_per_token: int = 4,
        *,
        sampling_rate: int = SAMPLING_RATE,
        window: float = 0.025,
        hop: float = 0.010,
        low: float = 0.0,
        high: float | None = None,
        mel_scale: str = "slaney",
        normalization: str = "fixed",
        device: str | torch.device | None = None,
    ) -> None:
        self.sampling_rate = check_int("sampling_rate", sampling_rate)
        self.frames_per_token = check_int("frames_per_token", frames_per_token)
        self.normalization = check_choice("normalization", normalization, _NORMALIZATIONS)
        self._window, self._hop = (
            max(1, round(check_float(name, value, at_least=0) * sampling_rate))
            for name, value in (("window", window), ("hop", hop))
        )
        if self._hop > self._window:
            raise ConfigError(f"hop must be at most the window of {window} s, got {hop}: samples would be left out")
        high = sampling_rate / 2 if high is None else check_float("high", high)
        if not 0 <= check_float("low", low) < high <= sampling_rate / 2:
            raise ConfigError(
                f"bands go from 0 ≤ low < high ≤ {sampling_rate / 2:g} Hz, half the sampling rate; got {low} to {high}"
            )
        filters = mel_filters(n_mels, self._window, sampling_rate, low, high, mel_scale)
        if not filters.any(0).all():
            raise ConfigError(
                f"{n_mels} bands from {low:g} to {high:g} Hz are narrower than the {sampling_rate / self._window:g} Hz "
                "between the frequencies of a frame, and some have none; give fewer, or a longer window"
            )
        settings = {
            "encoder": "log mel", "n_mels": n_mels, "frames_per_token": frames_per_token,
            "sampling_rate": sampling_rate, "window": self._window, "hop": self._hop, "low": low, "high": high,
            "mel_scale": mel_scale, "normalization": normalization,
        }  # fmt: skip
        super().__init__(_Bands(filters, torch.hann_window(self._window)), settings, device)
        self.dim = n_mels * frames_per_token

    @property
    def token_seconds(self) -> float:
        """Seconds from the beginning of one token to that of the next."""
        return self._hop * self.frames_per_token / self.sampling_rate

    def forward(
        self,
        sounds: Any,
        *,
        sampling_rate: int | None = None,
        batch_size: int = 32,
        progress: bool = False,
        max_seconds: float = MAX_SECONDS,
        max_clipped: float = MAX_CLIPPED,
    ) -> Memory:
        """The memory (b, m, e) of b sounds, the shorter ones padded; `encode` is the same.

        `sources` of the memory says which sound, and from which second to which: {"audio": 0, "start": 0.04,
        "end": 0.08}. A token's first frame begins where it starts; its last one reaches a window beyond.

        Args:
            sounds: one sound or a list of them, of any kind that `load_audio` reads.
            sampling_rate: of arrays and tensors; by default that of the encoder. Files say their own.
            batch_size: sounds that are read before the progress is shown.
            progress: show the progress on stderr.
            max_seconds: longer sounds are refused.
            max_clipped: as in `load_audio`.

        Raises:
            AudioError: a sound cannot be read, or is shorter than a frame; the message says which one.
            ConfigError: `batch_size` is no positive int.
        """
        check_int("batch_size", batch_size)
        given, rows = as_sounds(sounds), []
        for start in batches(len(given), batch_size, "encoding", progress):
            waves = load_sounds(
                given[start : start + batch_size], self.sampling_rate, source_rate=sampling_rate, first=start,
                max_seconds=max_seconds, max_clipped=max_clipped,
            )  # fmt: skip
            for number, wave in enumerate(waves, start=start):
                if len(wave) < self._window:
                    raise AudioError(
                        f"sound {number} has {len(wave)} samples at {self.sampling_rate} Hz, too short for one frame "
                        f"of {self._window}; give a longer one"
                    )
                rows.append(self._whole(wave))
        if not rows:
            return Memory(torch.zeros(0, 0, self.dim, dtype=self.dtype, device=self.device))
        memory = Memory.pad(rows)
        sources = [
            self._origins(number, 0, length) + [None] * (memory.length - length)
            for number, length in enumerate(map(len, rows))
        ]
        return Memory(memory.tokens, memory.mask, sources=sources)

    encode = forward

    def stream(self, pieces: Any, *, sampling_rate: int | None = None) -> Iterator[Memory]:
        """The memory of one sound piece by piece, as it arrives: each token as soon as its samples are there.

        The tokens are those of the whole sound, one after the other; what is left at the end is filled up with silence.

        Args:
            pieces: waveforms (samples,) that follow each other, or one sound, as for `stream_audio`.
            sampling_rate: of the pieces; by default that of the encoder.

        Yields:
            Memories (1, n, e) with n of 1 or more, for `MemoryStream.append`.

        Raises:
            ConfigError: a normalization over the whole sound.
            AudioError: a piece cannot be read.

        >>> ear = LogMelEncoder()
        >>> [memory.length for memory in ear.stream([torch.zeros(1000), torch.zeros(100), torch.zeros(2000)])]
        [1, 3, 1]
        """
        if self.normalization != "fixed":
            raise ConfigError(
                f"normalization {self.normalization!r} needs the whole sound; build the encoder with 'fixed' to stream"
            )
        number, waiting = 0, torch.zeros(0)
        step = self._hop * self.frames_per_token
        for piece in stream_audio(pieces, self.sampling_rate, source_rate=sampling_rate):
            waiting = torch.cat([waiting, piece])
            # The last frame of a token reaches over its end.
            count = (len(waiting) - (self._window - self._hop)) // step
            if count > 0:
                yield self._numbered(self._tokens(waiting, count), number)
                number, waiting = number + count, waiting[count * step :]
        if len(waiting):
            rest = self._tokens(waiting, math.ceil(len(waiting) / step))
            yield self._numbered(rest, number)

    def _numbered(self, tokens: Tensor, first: int) -> Memory:
        return Memory(tokens[None], sources=[self._origins(0, first, first + len(tokens))])

    def _whole(self, wave: Tensor) -> Tensor:
        """Tokens (m, e) of a waveform (samples,), normalised."""
        count = math.ceil(len(wave) / (self._hop * self.frames_per_token))
        tokens = self._tokens(wave, count)
        if self.normalization == "fixed":
            return tokens
        frames = tokens.view(count * self.frames_per_token, -1)
        real = frames[: math.ceil(len(wave) / self._hop)]
        if self.normalization == "whisper":
            frames = frames.maximum(real.max() - 8 / 4)
        else:
            deviation, mean = torch.std_mean(real, 0, correction=0)
            frames = (frames - mean) / (deviation + 1e-5)
        return frames.view(count, -1)

    @torch.no_grad()
    def _tokens(self, wave: Tensor, count: int) -> Tensor:
        """The first tokens (count, e) of a waveform that is followed by silence, as (log10 + 4) / 4."""
        frames = count * self.frames_per_token
        needed = (frames - 1) * self._hop + self._window
        wave = nn.functional.pad(wave[:needed], (0, max(0, needed - len(wave)))).to(self.device)
        parts = []
        for start in range(0, frames, _BLOCK):
            stop = min(frames, start + _BLOCK)
            part = wave[start * self._hop : (stop - 1) * self._hop + self._window].unfold(0, self._window, self._hop)
            parts.append(self.model(part))
        return ((torch.cat(parts) + 4) / 4).to(self.dtype).view(count, -1)

    def _origins(self, audio: int, first: int, stop: int) -> list[Any]:
        step = self._hop * self.frames_per_token
        times = [round(number * step / self.sampling_rate, 6) for number in range(first, stop + 1)]
        return [{"audio": audio, "start": start, "end": end} for start, end in zip(times, times[1:], strict=False)]

    def extra_repr(self) -> str:
        return f"dim={self.dim}, sampling_rate={self.sampling_rate}, token_seconds={self.token_seconds:g}"


class _Bands(nn.Module):
    """Decimal logarithms of the mel energies of frames."""

    filters: Tensor
    window: Tensor

    def __init__(self, filters: Tensor, window: Tensor) -> None:
        super().__init__()
        # The settings say all there is in them, and their last digits may differ from machine to machine.
        self.register_buffer("filters", filters, persistent=False)
        self.register_buffer("window", window, persistent=False)

    def forward(self, frames: Tensor) -> Tensor:
        """(f, n_mels) of frames (f, samples)."""
        power = torch.fft.rfft(frames * self.window.float()).abs().square()
        return (power @ self.filters.float()).clamp_min(_FLOOR).log10()


def mel_filters(
    n_mels: int, samples: int, sampling_rate: int, low: float = 0.0, high: float | None = None, scale: str = "slaney"
) -> Tensor:
    """Triangles (samples // 2 + 1, n_mels) that sum the power spectrum of a frame to bands, evenly spaced in mels.

    Args:
        n_mels: bands.
        samples: of a frame.
        sampling_rate: samples in a second.
        low: frequency in Hz where the first band begins.
        high: frequency in Hz where the last band ends; by default half the sampling rate.
        scale: "slaney" (linear up to 1 kHz, then logarithmic; bands of one area) or "htk" (2595 log10(1 + f / 700);
            bands of one height).

    Raises:
        ConfigError: a setting outside what is allowed.

    >>> mel_filters(80, 400, 16000).shape
    torch.Size([201, 80])
    """
    check_int("n_mels", n_mels)
    check_choice("mel_scale", scale, ("slaney", "htk"))
    ends = _to_mels(torch.tensor([low, sampling_rate / 2 if high is None else high], dtype=torch.float64), scale)
    edges = _to_hertz(torch.linspace(float(ends[0]), float(ends[1]), n_mels + 2, dtype=torch.float64), scale)
    frequencies = torch.arange(samples // 2 + 1, dtype=torch.float64) * sampling_rate / samples
    rising = (frequencies[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies[:, None]) / (edges[2:] - edges[1:-1])
    triangles = torch.minimum(rising, falling).clamp_min(0)
    return (triangles * 2 / (edges[2:] - edges[:-2]) if scale == "slaney" else triangles).float()


def _to_mels(hertz: Tensor, scale: str) -> Tensor:
    if scale == "htk":
        return 2595 * torch.log10(1 + hertz / 700)
    above = 15 + (hertz.clamp_min(1000) / 1000).log() * 27 / math.log(6.4)
    return torch.where(hertz < 1000, 3 * hertz / 200, above)


def _to_hertz(mels: Tensor, scale: str) -> Tensor:
    if scale == "htk":
        return 700 * (10 ** (mels / 2595) - 1)
    above = 1000 * ((mels.clamp_min(15) - 15) * math.log(6.4) / 27).exp()
    return torch.where(mels < 15, 200 * mels / 3, above)
