"""Encoders of sounds: a base class that reads and streams them, and the audio encoders of transformers."""

from __future__ import annotations

import json
import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mmattn.encoders.audio_input import MAX_SECONDS, load_sounds, sound_list, stream_audio
from mmattn.encoders.base import FrozenEncoder
from mmattn.errors import AudioError, ConfigError, check_float, check_int, import_extra
from mmattn.memory import Memory
from mmattn.progress import batches
from mmattn.storage.hub import load_feature_extractor, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.feature_extraction_utils import FeatureExtractionMixin

#: Seconds of a window of a model that reads sounds of any length.
_SECONDS = 30.0
#: Weights of the pretraining, which may be random.
_UNUSED = ("masked_spec_embed",)

#: Tokens (m, e) of a sound and the source of each.
Encoded = tuple[Tensor, list[Any]]


class SoundEncoder(FrozenEncoder):
    """Base class of encoders of sounds, which implement `_encode_waves` and `_stream`."""

    sampling_rate: int

    def forward(
        self,
        sounds: object,
        *,
        sampling_rate: int | None = None,
        batch_size: int = 8,
        progress: bool = False,
        max_seconds: float = MAX_SECONDS,
    ) -> Memory:
        """Return the memory (b, m, e) of b sounds, padded, computed without gradients; `encode` is the same.

        `sources` of the memory gives the sound, begin and end in seconds: {"audio": 0, "start": 1.28, "end": 1.3}, and
        for models of spectrograms the "band", counted from the lowest.

        Args:
            sounds: one sound or a list of them, of any kind that `load_audio` reads.
            sampling_rate: of arrays and tensors; by default that of the encoder. Files have their own.
            batch_size: sounds that are read at once, and windows that pass a network at once.
            progress: show the progress on stderr.
            max_seconds: longer sounds are refused; `stream` reads them in pieces.

        Raises:
            AudioError: a sound cannot be read, or is too short for one token; the message says which one.
            ConfigError: `batch_size` is no positive int.
        """
        check_int("batch_size", batch_size)
        items = sound_list(sounds)
        rows: list[Encoded] = []
        for start in batches(len(items), batch_size, "encoding", progress):
            waves = load_sounds(
                items[start : start + batch_size], self.sampling_rate, source_rate=sampling_rate, first=start,
                max_seconds=max_seconds,
            )  # fmt: skip
            rows += self._encode_waves(waves, start, batch_size)
        return self._padded([tokens for tokens, _ in rows], [sources for _, sources in rows])

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
            ConfigError: an encoder that needs the whole sound: pooled, or normalised over it.
        """
        self._check_stream()
        for tokens, sources in self._stream(stream_audio(pieces, self.sampling_rate, source_rate=sampling_rate)):
            if len(tokens):
                yield Memory(tokens[None], sources=[sources])

    def _check_stream(self) -> None:
        """Raise ConfigError if the encoder needs the whole sound."""

    @abstractmethod
    def _encode_waves(self, waves: list[Tensor], first: int, batch_size: int) -> list[Encoded]:
        """Encode waveforms, numbered from `first`."""

    @abstractmethod
    def _stream(self, pieces: Iterator[Tensor]) -> Iterator[Encoded]:
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

    model: Any

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
            feature_extractor = feature_extractor or load_feature_extractor(name)
            name = load_model("AutoModel", name, "audio encoder", unused=_UNUSED)
        elif feature_extractor is None:
            raise ConfigError(f"{type(name).__name__} is a model: give its feature_extractor, too")
        self.feature_extractor = feature_extractor
        self.sampling_rate: int = check_int("sampling_rate", getattr(feature_extractor, "sampling_rate", None))
        model = _audio_part(name)
        # The samples to which the extractor pads every sound, or None.
        self._fixed: int | None = getattr(
            feature_extractor, "n_samples", getattr(feature_extractor, "nb_max_samples", None)
        )
        longest = _SECONDS if self._fixed is None else self._fixed / self.sampling_rate
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
            with torch.no_grad():
                self.dim: int = self._states([example])[0].shape[-1]
        except (AttributeError, KeyError, TypeError, ValueError, _TooShortError) as error:
            raise ConfigError(
                f"{type(model).__name__} does not turn sounds alone into states of their times ({error}); name an "
                "audio encoder"
            ) from error

    def _check_stream(self) -> None:
        if self.pooled:
            raise ConfigError("pooled states need the whole sound; build the encoder without pooled to stream")

    def _encode_waves(self, waves: list[Tensor], first: int, batch_size: int) -> list[Encoded]:
        windows = [_Window(first + i, *window) for i, wave in enumerate(waves) for window in self._cut([wave])]
        parts: dict[int, list[Encoded]] = {first + i: [] for i in range(len(waves))}
        for window, encoded in zip(windows, self._encode_windows(windows, batch_size), strict=True):
            parts[window.sound].append(encoded)
        rows: list[Encoded] = []
        for number, part in parts.items():
            tokens = torch.cat([tokens for tokens, _ in part])
            if self.pooled:
                rows.append((tokens.mean(0, keepdim=True), [{"audio": number}]))
            else:
                rows.append((tokens, [source for _, sources in part for source in sources]))
        return rows

    def _stream(self, pieces: Iterator[Tensor]) -> Iterator[Encoded]:
        for window in self._cut(pieces):
            yield from self._encode_windows([_Window(0, *window)], 1)

    def _cut(self, pieces: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Cut a sound that arrives in pieces into windows, each with its first sample; the last one may be shorter."""
        length = round(self.window * self.sampling_rate)
        start, waiting = 0, torch.zeros(0)
        for piece in pieces:
            waiting = torch.cat([waiting, piece])
            while len(waiting) > length:
                yield start, waiting[:length]
                start, waiting = start + length, waiting[length:]
        yield start, waiting

    @torch.no_grad()
    def _encode_windows(self, windows: list[_Window], batch_size: int) -> list[Encoded]:
        """Encode windows; those of one length pass the network together."""
        order = sorted(range(len(windows)), key=lambda i: len(windows[i].samples))
        encoded: dict[int, Encoded] = {}
        while order:
            length = len(windows[order[0]].samples)
            batch = [i for i in order[:batch_size] if len(windows[i].samples) == length]
            order = order[len(batch) :]
            try:
                states, real = self._states([windows[i].samples for i in batch])
            except _TooShortError as error:
                if not all(windows[i].start for i in batch):
                    number = next(windows[i].sound for i in batch if not windows[i].start)
                    raise AudioError(
                        f"sound {number} has {length} samples at {self.sampling_rate} Hz, too short for one state of "
                        f"{type(self.model).__name__}; give a longer one"
                    ) from error
                # The rest of a longer sound.
                states, real = torch.zeros(len(batch), 0, 1, self.dim, dtype=self.dtype, device=self.device), 0
            step = self._step(states.shape[1], length)
            for i, state in zip(batch, states[:, :real], strict=True):
                encoded[i] = (state.flatten(0, 1), self._sources(windows[i], len(state), state.shape[1], step))
        return [encoded[i] for i in range(len(windows))]

    def _sources(self, window: _Window, times: int, bands: int, step: float) -> list[dict[str, float]]:
        starts = [(window.start + number * step) / self.sampling_rate for number in range(times)]
        return [
            {"audio": window.sound, "start": round(start, 4), "end": round(start + step / self.sampling_rate, 4)}
            | ({} if bands == 1 else {"band": band})
            for start in starts
            for band in range(bands)
        ]

    def _states(self, waves: list[Tensor]) -> tuple[Tensor, int]:
        """Return states (n, times, bands, e) of waveforms of one length, and the number of times without padding."""
        samples = len(waves[0])
        lengths = getattr(self.model, "_get_feat_extract_output_lengths", None)
        inputs = self._features(waves)
        mask = inputs.pop("attention_mask", None)
        if mask is not None and lengths is not None and int(lengths(mask[0].sum())) < 1:
            raise _TooShortError
        if mask is not None and self.feature_extractor.return_attention_mask:
            inputs["attention_mask"] = mask
        try:
            out: Tensor = self.model(**inputs).last_hidden_state
        except RuntimeError as error:
            # The message of a convolution for an input shorter than its kernel.
            if "ernel size can't be greater" not in str(error):
                raise
            raise _TooShortError from error
        # CLAP: (n, e, bands, times).
        states = out.permute(0, 3, 2, 1) if out.dim() == 4 else out[:, :, None]
        times = states.shape[1]
        if mask is None:
            return states, math.ceil(times * samples / (self._fixed or samples))
        return states, min(times, int(lengths(mask[0].sum()) if lengths is not None else mask[0].sum()))

    def _features(self, waves: list[Tensor]) -> dict[str, Tensor]:
        """Return the model inputs of waveforms of one length."""
        random = import_extra("numpy", "audio").random
        # CLAP's extractor draws random numbers; the state of the caller stays.
        state = random.get_state()
        try:
            inputs = dict(
                self.feature_extractor(
                    [wave.numpy() for wave in waves], sampling_rate=self.sampling_rate, return_tensors="pt",
                    return_attention_mask=True,
                )
            )  # fmt: skip
        finally:
            random.set_state(state)
        if "is_longer" in inputs:
            inputs["is_longer"] = torch.zeros(len(waves), 1, dtype=torch.bool)
        return {
            name: value.to(self.device, self.dtype) if value.is_floating_point() else value.to(self.device)
            for name, value in inputs.items()
        }

    def _step(self, times: int, samples: int) -> float:
        """Return the samples from one state to the next."""
        config = self.model.config
        ratio = getattr(config, "inputs_to_logits_ratio", None)
        if ratio is not None and not getattr(config, "add_adapter", False):
            return float(ratio)
        return (self._fixed or samples) / max(times, 1)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, sampling_rate={self.sampling_rate}, window={self.window:g}"


class _TooShortError(Exception):
    """A sound gives no state."""


class _Window(NamedTuple):
    """A stretch of a sound from a sample on."""

    sound: int
    start: int
    samples: Tensor


def _audio_part(model: Any) -> Any:
    """Return the part of a model that encodes sounds, without a head."""
    model = getattr(model, "base_model", model)
    for name in ("audio_model", "audio_tower"):
        if hasattr(model, name):
            return getattr(model, name)
    if not hasattr(model, "config"):
        raise ConfigError(f"{type(model).__name__} is no model of transformers; name one, or subclass SoundEncoder")
    return model.get_encoder() if model.config.is_encoder_decoder and hasattr(model, "get_encoder") else model
