"""Log-mel energies of sounds as a memory, without any weights: the features that speech models read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.encoders.audio import Encoded, SoundEncoder
from mmattn.encoders.audio_input import SAMPLING_RATE
from mmattn.errors import AudioError, ConfigError, check_choice, check_float, check_int

_NORMALIZATIONS = ("fixed", "mean_std")
#: Smallest power, that of silence.
_FLOOR = 1e-10
#: Frames that are transformed at once: 40 s, some 100 MB.
_BLOCK = 4096


class LogMelEncoder(SoundEncoder):
    """Log-mel energies of sounds as a memory (b, m, e), one token for each `frames_per_token` frames.

    A frame is the power spectrum of `window` seconds under a Hann window, summed by `n_mels` triangles on Slaney's mel
    scale, as a decimal logarithm. With the defaults these are the features of Whisper (arXiv 2212.04356, section 2.2)
    at 40 ms a token, except that frames are not centred: frame i begins at i × `hop`. The last token is filled up with
    silence.

    Args:
        n_mels: bands.
        frames_per_token: frames side by side in one token.
        sampling_rate: samples in a second; sounds at other rates are resampled.
        window: seconds of a frame.
        hop: seconds from one frame to the next.
        normalization: "fixed" for (log10 + 4) / 4, or "mean_std" for mean 0 and deviation 1 of each band over the
            sound. Only "fixed" can be streamed.
        device: where it is computed, by default the CPU.

    Attributes:
        dim: width e of the memory: n_mels × frames_per_token.
        token_seconds: from the begin of one token to that of the next.

    Raises:
        ConfigError: a setting outside what is allowed, or a band without any frequency.

    >>> encoder = LogMelEncoder(n_mels=40)
    >>> memory = encoder([torch.zeros(16000), torch.zeros(4000)])
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
        filters = _mel_filters(check_int("n_mels", n_mels), self._window, sampling_rate)
        if not filters.any(0).all():
            raise ConfigError(
                f"{n_mels} bands are narrower than the {sampling_rate / self._window:g} Hz between frequencies, and "
                "some have none; give fewer, or a longer window"
            )
        settings = {
            "encoder": "log mel", "n_mels": n_mels, "frames_per_token": frames_per_token,
            "sampling_rate": sampling_rate, "window": self._window, "hop": self._hop, "normalization": normalization,
        }  # fmt: skip
        super().__init__(_Bands(filters, torch.hann_window(self._window)), settings, device)
        self.dim = n_mels * frames_per_token

    @property
    def token_seconds(self) -> float:
        """Seconds from the begin of one token to that of the next."""
        return self._hop * self.frames_per_token / self.sampling_rate

    def _check_stream(self) -> None:
        if self.normalization != "fixed":
            raise ConfigError(
                f"normalization {self.normalization!r} needs the whole sound; build the encoder with 'fixed' to stream"
            )

    def _encode_waves(self, waves: list[Tensor], first: int, batch_size: int) -> list[Encoded]:
        rows = []
        for number, wave in enumerate(waves, start=first):
            if len(wave) < self._window:
                raise AudioError(
                    f"sound {number} has {len(wave)} samples at {self.sampling_rate} Hz, too short for one frame "
                    f"of {self._window}; give a longer one"
                )
            tokens = self._whole(wave)
            rows.append((tokens, self._origins(number, 0, len(tokens))))
        return rows

    def _stream(self, pieces: Iterator[Tensor]) -> Iterator[Encoded]:
        number, waiting = 0, torch.zeros(0)
        step = self._hop * self.frames_per_token
        for piece in pieces:
            waiting = torch.cat([waiting, piece])
            # The last frame of a token reaches beyond its end.
            count = (len(waiting) - (self._window - self._hop)) // step
            if count > 0:
                yield self._tokens(waiting, count), self._origins(0, number, number + count)
                number, waiting = number + count, waiting[count * step :]
        if len(waiting):
            count = math.ceil(len(waiting) / step)
            yield self._tokens(waiting, count), self._origins(0, number, number + count)

    def _whole(self, wave: Tensor) -> Tensor:
        """Return normalised tokens (m, e) of a waveform (samples,)."""
        count = math.ceil(len(wave) / (self._hop * self.frames_per_token))
        tokens = self._tokens(wave, count)
        if self.normalization == "fixed":
            return tokens
        frames = tokens.view(count * self.frames_per_token, -1)
        real = frames[: math.ceil(len(wave) / self._hop)]
        deviation, mean = torch.std_mean(real, 0, correction=0)
        frames = (frames - mean) / (deviation + 1e-5)
        return frames.view(count, -1)

    @torch.no_grad()
    def _tokens(self, wave: Tensor, count: int) -> Tensor:
        """Return the first tokens (count, e) of a waveform followed by silence, as (log10 + 4) / 4."""
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
    """Compute decimal logarithms of the mel energies of frames."""

    filters: Tensor
    window: Tensor

    def __init__(self, filters: Tensor, window: Tensor) -> None:
        super().__init__()
        # Not in the fingerprint: the settings define them, and their last digits may differ between machines.
        self.register_buffer("filters", filters, persistent=False)
        self.register_buffer("window", window, persistent=False)

    def forward(self, frames: Tensor) -> Tensor:
        """Return (f, n_mels) of frames (f, samples)."""
        power = torch.fft.rfft(frames * self.window.float()).abs().square()
        return (power @ self.filters.float()).clamp_min(_FLOOR).log10()


def _mel_filters(n_mels: int, samples: int, sampling_rate: int) -> Tensor:
    """Return triangles (samples // 2 + 1, n_mels) that sum the power spectrum of a frame to bands."""
    from transformers.audio_utils import mel_filter_bank

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bands without a frequency, which are an error here
        filters = mel_filter_bank(
            samples // 2 + 1, n_mels, 0.0, sampling_rate / 2, sampling_rate, norm="slaney", mel_scale="slaney"
        )
    return torch.from_numpy(filters).float()
