"""Encoders of sounds: log-mel energies, and the audio encoders of transformers."""

from __future__ import annotations

import json
import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.encoders.audio_input import MAX_SECONDS, SAMPLING_RATE, load_audio, sound_list, stream_audio
from mmattn.encoders.base import FrozenEncoder, Source
from mmattn.errors import AudioError, ConfigError, check_float, check_int, import_extra
from mmattn.memory import Memory
from mmattn.models.loading import load_model, load_part
from mmattn.progress import tracked

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.feature_extraction_utils import FeatureExtractionMixin

#: Samples of a sound that are encoded at once, where a model does not say: one minute at 16 kHz.
_BLOCK = 960_000

#: Tokens (m, e) of a part of a sound, and the times of each.
Encoded = tuple[Tensor, list[Source]]


class SoundEncoder(FrozenEncoder):
    """Base class of encoders of sounds, which implement `_encode`."""

    sampling_rate: int
    #: One token for each sound, the mean of its tokens.
    pooled = False

    def forward(
        self,
        sounds: object,
        *,
        sampling_rate: int | None = None,
        progress: bool = False,
        max_seconds: float = MAX_SECONDS,
    ) -> Memory:
        """Return the memory (b, m, e) of b sounds, padded, computed without gradients; `encode` is the same.

        `sources` of the memory gives the sound, begin and end in seconds: {"audio": 0, "start": 1.28, "end": 1.3}, and
        for models of spectrograms the "band", counted from the lowest.

        Args:
            sounds: one sound or a list of them, of any kind that `load_audio` reads.
            sampling_rate: of arrays and tensors; by default that of the encoder. Files have their own.
            progress: show the progress on stderr.
            max_seconds: longer sounds are refused; `stream` reads them in pieces.

        Raises:
            AudioError: a sound cannot be read, or is too short for one token; the message says which one.
        """
        items, rows, sources = sound_list(sounds), [], []
        for number in tracked(len(items), "encoding", progress):
            try:
                wave = load_audio(items[number], self.sampling_rate, source_rate=sampling_rate, max_seconds=max_seconds)
                parts = list(self._encode(wave.split(_BLOCK)))
            except AudioError as error:
                raise AudioError(f"sound {number}: {error}") from error
            tokens = torch.cat([tokens for tokens, _ in parts])
            rows.append(tokens.mean(0, keepdim=True) if self.pooled else tokens)
            times: list[Source] = [{}] if self.pooled else [time for _, times in parts for time in times]
            sources.append([{"audio": number, **time} for time in times])
        return self._padded(rows, sources)

    encode = forward

    def stream(self, pieces: object, *, sampling_rate: int | None = None) -> Iterator[Memory]:
        """Yield the memory of one sound piece by piece, as it arrives; the tokens are those of the whole sound.

        Args:
            pieces: waveforms (samples,) that follow each other, or one sound, as for `stream_audio`.
            sampling_rate: of the pieces; by default that of the encoder.

        Yields:
            Memories (1, n, e) with n of 1 or more, for `MemoryStream.append`.

        Raises:
            AudioError: a piece cannot be read, or all of them are too short for one token.
            ConfigError: the encoder is pooled, which needs the whole sound.
        """
        if self.pooled:
            raise ConfigError("pooled states need the whole sound; build the encoder without pooled to stream")
        for tokens, times in self._encode(stream_audio(pieces, self.sampling_rate, source_rate=sampling_rate)):
            if len(tokens):
                yield Memory(tokens[None], sources=[[{"audio": 0, **time} for time in times]])

    @abstractmethod
    def _encode(self, pieces: Iterable[Tensor]) -> Iterator[Encoded]:
        """Encode a waveform that arrives in pieces."""


class AudioEncoder(SoundEncoder):
    """Hidden states of a frozen audio encoder of transformers as a memory (b, m, e): a token for each time step.

    The encoder of an encoder-decoder and the audio part of CLAP are used; CLAP gives a token for each time and band.
    Longer sounds are encoded in windows that follow each other. States of a model's own padding are left out.

    Args:
        name: any name or folder that `transformers.AutoModel` reads, with safetensors weights; or the model itself.
        feature_extractor: needed with a model itself; otherwise that of the name.
        window: seconds of a window; by default that of the model (Whisper: 30, CLAP: 10), or 30.
        pooled: one token for each sound, the mean of its states (m = 1).
        device: where the network runs, by default the CPU.

    Attributes:
        dim: width e of the memory.
        feature_extractor: of the model.
        sampling_rate: samples in a second that the model expects; sounds at other rates are resampled.
        window: seconds of a window.

    Raises:
        ConfigError: a setting outside what is allowed, or a model that gives no states for sounds.
        AdapterFileError: nothing to load, or weights that are incomplete or not safetensors.
        NonFiniteError: NaN or infinity in the weights.
    """

    model: PreTrainedModel

    def __init__(
        self,
        name: str | os.PathLike[str] | PreTrainedModel,
        feature_extractor: FeatureExtractionMixin | None = None,
        *,
        window: float | None = None,
        pooled: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        if isinstance(name, (str, os.PathLike)):
            feature_extractor = feature_extractor or load_part("AutoFeatureExtractor", name, "feature extractor")
            # Weights of the pretraining may be random.
            name = load_model("AutoModel", name, "audio encoder", unused=("masked_spec_embed",))
        elif feature_extractor is None:
            raise ConfigError(f"{type(name).__name__} is a model: give its feature_extractor, too")
        self.feature_extractor = feature_extractor
        self.sampling_rate = check_int("sampling_rate", getattr(feature_extractor, "sampling_rate", None))
        model = _audio_part(name)
        # The samples to which Whisper's and CLAP's extractors pad every sound.
        self._fixed: int | None = getattr(
            feature_extractor, "n_samples", getattr(feature_extractor, "nb_max_samples", None)
        )
        longest = 30.0 if self._fixed is None else self._fixed / self.sampling_rate
        self.window = longest if window is None else check_float("window", window, at_least=1e-3)
        if self._fixed is not None and self.window > longest:
            raise ConfigError(f"{type(model).__name__} reads {longest:g} s at once, and window is {window}: give less")
        self.pooled = pooled
        settings = {
            "encoder": "audio",
            "model": model.config.model_type,
            "features": json.loads(feature_extractor.to_json_string()),
            "window": self.window,
            "pooled": pooled,
        }
        super().__init__(model, settings, device)
        # Not silence, which has deviation 0.
        example = torch.linspace(-0.1, 0.1, round(min(self.window, 1.0) * self.sampling_rate))
        try:
            self.dim: int = self._states(example)[0].shape[-1]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(model).__name__} does not turn sounds alone into states of their times ({error}); name an "
                "audio encoder"
            ) from error

    def _encode(self, pieces: Iterable[Tensor]) -> Iterator[Encoded]:
        length = round(self.window * self.sampling_rate)
        start, waiting = 0, torch.zeros(0)
        for piece in pieces:
            waiting = torch.cat([waiting, piece])
            while len(waiting) > length:
                yield self._encode_window(waiting[:length], start)
                start, waiting = start + length, waiting[length:]
        yield self._encode_window(waiting, start)

    def _encode_window(self, samples: Tensor, start: int) -> Encoded:
        """Encode the samples of a sound from `start` on."""
        states, step = self._states(samples)
        if not len(states) and not start:
            raise AudioError(
                f"{len(samples)} samples at {self.sampling_rate} Hz are too short for one state of "
                f"{type(self.model).__name__}; give a longer sound"
            )
        bands, times = states.shape[1], list[Source]()
        for number in range(len(states)):
            begin = (start + number * step) / self.sampling_rate
            time: Source = {"start": round(begin, 4), "end": round(begin + step / self.sampling_rate, 4)}
            times += [time] if bands == 1 else [{**time, "band": band} for band in range(bands)]
        return states.flatten(0, 1), times

    @torch.no_grad()
    def _states(self, wave: Tensor) -> tuple[Tensor, float]:
        """Return states (times, bands, e) of a waveform without those of padding, and the samples between two."""
        inputs = self._features(wave)
        mask, lengths = (
            inputs.pop("attention_mask", None),
            getattr(self.model, "_get_feat_extract_output_lengths", None),
        )
        real = None if mask is None else int(mask.sum() if lengths is None else lengths(mask.sum()))
        if real is not None and real < 1:
            return torch.zeros(0, 1, self.dim, dtype=self.dtype, device=self.device), 1.0
        if mask is not None and self.feature_extractor.return_attention_mask:
            inputs["attention_mask"] = mask
        out: Tensor = self.model(**inputs).last_hidden_state[0]
        # CLAP: (e, bands, times).
        states = out.permute(2, 1, 0) if out.dim() == 3 else out[:, None]
        samples = self._fixed or len(wave)
        config, step = self.model.config, samples / max(len(states), 1)
        if hasattr(config, "inputs_to_logits_ratio") and not getattr(config, "add_adapter", False):
            step = float(config.inputs_to_logits_ratio)
        return states[: math.ceil(len(states) * len(wave) / samples) if real is None else real], step

    def _features(self, wave: Tensor) -> dict[str, Tensor]:
        """Return the model inputs of a waveform."""
        random = import_extra("numpy", "audio").random
        # CLAP's extractor draws random numbers; the state of the caller stays.
        state = random.get_state()
        try:
            inputs = self.feature_extractor(
                wave.numpy(), sampling_rate=self.sampling_rate, return_tensors="pt", return_attention_mask=True
            )
        finally:
            random.set_state(state)
        if "is_longer" in inputs:
            inputs["is_longer"] = torch.zeros(1, 1, dtype=torch.bool)
        return {
            name: value.to(self.device, self.dtype) if value.is_floating_point() else value.to(self.device)
            for name, value in inputs.items()
        }

    def extra_repr(self) -> str:
        return f"dim={self.dim}, sampling_rate={self.sampling_rate}, window={self.window:g}"


def _audio_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that encodes sounds, without a head."""
    model = getattr(model, "base_model", model)
    model = getattr(model, "audio_model", getattr(model, "audio_tower", model))
    if not hasattr(model, "config"):
        raise ConfigError(f"{type(model).__name__} is no model of transformers; name one, or subclass SoundEncoder")
    return model.get_encoder() if model.config.is_encoder_decoder else model


class LogMelEncoder(SoundEncoder):
    """Log-mel energies of sounds as a memory (b, m, e), one token for each `frames_per_token` frames.

    A frame is the power spectrum of `window` seconds under a Hann window, summed by `n_mels` triangles on Slaney's mel
    scale, as (log10 + 4) / 4. With the defaults these are the features of Whisper (arXiv 2212.04356, section 2.2)
    at 40 ms a token, except that frames are not centred: frame i begins at i × `hop`. The last token is filled up with
    silence.

    Args:
        n_mels: bands.
        frames_per_token: frames side by side in one token.
        sampling_rate: samples in a second; sounds at other rates are resampled.
        window: seconds of a frame.
        hop: seconds from one frame to the next.
        device: where it is computed, by default the CPU.

    Attributes:
        dim: width e of the memory: n_mels × frames_per_token.

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
        device: str | torch.device | None = None,
    ) -> None:
        from transformers.audio_utils import mel_filter_bank

        self.sampling_rate = check_int("sampling_rate", sampling_rate)
        self.frames_per_token = check_int("frames_per_token", frames_per_token)
        self._window, self._hop = (
            max(1, round(check_float(name, seconds, at_least=0) * sampling_rate))
            for name, seconds in (("window", window), ("hop", hop))
        )
        if self._hop > self._window:
            raise ConfigError(f"hop must be at most the window of {window} s, got {hop}: samples would be left out")
        # Not in the fingerprint: the settings define them, and their last digits may differ between machines.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bands without a frequency, which are an error here
            filters = mel_filter_bank(
                self._window // 2 + 1, check_int("n_mels", n_mels), 0.0, sampling_rate / 2, sampling_rate,
                norm="slaney", mel_scale="slaney",
            )  # fmt: skip
        self._filters = torch.from_numpy(filters).float()  # (frequencies, n_mels)
        if not self._filters.any(0).all():
            raise ConfigError(
                f"{n_mels} bands are narrower than the {sampling_rate / self._window:g} Hz between frequencies, and "
                "some have none; give fewer, or a longer window"
            )
        settings = {
            "encoder": "log mel", "n_mels": n_mels, "frames_per_token": frames_per_token,
            "sampling_rate": sampling_rate, "window": self._window, "hop": self._hop,
        }  # fmt: skip
        super().__init__(None, settings, device)
        self.dim = n_mels * frames_per_token

    def _encode(self, pieces: Iterable[Tensor]) -> Iterator[Encoded]:
        number, waiting = 0, torch.zeros(0)
        step = self._hop * self.frames_per_token
        for piece in pieces:
            waiting = torch.cat([waiting, piece])
            # The last frame of a token reaches beyond its end.
            count = (len(waiting) - (self._window - self._hop)) // step
            if count > 0:
                yield self._tokens(waiting, number, count)
                number, waiting = number + count, waiting[count * step :]
        if len(waiting):
            yield self._tokens(waiting, number, math.ceil(len(waiting) / step))

    def _tokens(self, wave: Tensor, first: int, count: int) -> Encoded:
        """Return tokens of a waveform followed by silence, numbered from `first`."""
        frames, step = count * self.frames_per_token, self._hop * self.frames_per_token
        needed = (frames - 1) * self._hop + self._window
        wave = nn.functional.pad(wave[:needed], (0, max(0, needed - len(wave)))).to(self.device)
        hann = torch.hann_window(self._window, device=self.device)
        spectrum = torch.stft(wave, self._window, self._hop, window=hann, center=False, return_complex=True)
        energies = spectrum.abs().square().T @ self._filters.to(self.device)
        tokens = (energies.clamp_min(1e-10).log10() + 4) / 4
        times = [round(number * step / self.sampling_rate, 6) for number in range(first, first + count + 1)]
        sources: list[Source] = [{"start": start, "end": end} for start, end in zip(times, times[1:], strict=False)]
        return tokens.to(self.dtype).view(count, -1), sources

    def extra_repr(self) -> str:
        return f"dim={self.dim}, sampling_rate={self.sampling_rate}, hop={self._hop}"
