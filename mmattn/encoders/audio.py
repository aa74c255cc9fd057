"""Audio encoders of transformers as encoders: Whisper, wav2vec 2.0, HuBERT, WavLM, AST, CLAP and their kind."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders.audio_input import MAX_CLIPPED, MAX_SECONDS, as_sounds, load_sounds, stream_audio
from mmattn.encoders.audio_windows import Timeline, Window, cut
from mmattn.encoders.base import FrozenEncoder
from mmattn.errors import AudioError, ConfigError, check_float, check_int, import_extra
from mmattn.memory import Memory
from mmattn.progress import batches
from mmattn.storage.hub import load_feature_extractor, load_model

#: Seconds of a window of a model that reads sounds of any length.
_SECONDS = 30.0
#: Weights that run in pretraining only, and may be random.
_UNUSED = ("masked_spec_embed",)
#: Samples that the filters of AST's features step, and those of their frame.
_AST_HOP, _AST_FRAME = 160, 400


class AudioEncoder(FrozenEncoder):
    """States of sounds by a frozen audio encoder of transformers as a memory (b, m, e): a token for each time step.

    Of an encoder-decoder the encoder is used, of CLAP the audio part. Models of spectrograms (AST, CLAP) give a token
    for each time and band. Sounds longer than a window are encoded in windows; of what two windows share, each gives
    the half that is farther from its edge, so that every time is there once. What a model pads is masked.

    Args:
        name: any name or folder that `transformers.AutoModel` reads, with safetensors weights; or the model itself.
        feature_extractor: of a model that is given itself; otherwise that of the name.
        window: seconds of a window; by default what the model was built for (Whisper: 30, CLAP: 10), or 30.
        overlap: seconds that a window shares with the one before it.
        pooled: one token for each sound, the mean of its states (m = 1).
        device: where the network runs, by default the CPU.

    Attributes:
        dim: width e of the memory.
        feature_extractor: as given or loaded.
        sampling_rate: samples in a second that the model expects; sounds at other rates are resampled.
        window: seconds of a window.
        overlap: as given.
        pooled: as given.

    Raises:
        ConfigError: a setting outside what is allowed, or a model that does not turn sounds into states.
        AdapterFileError: nothing to load, or weights that are incomplete or not safetensors.
        NonFiniteError: NaN or infinity in the weights.
    """

    model: Any

    def __init__(
        self,
        name: str | os.PathLike[str] | Any,
        feature_extractor: Any = None,
        *,
        window: float | None = None,
        overlap: float = 0.0,
        pooled: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        if isinstance(name, (str, os.PathLike)):
            feature_extractor = feature_extractor or load_feature_extractor(name)
            name = load_model("AutoModel", name, "audio encoder", unused=_UNUSED)
        elif feature_extractor is None:
            raise ConfigError(f"{type(name).__name__} was given itself: give its feature_extractor, too")
        self.feature_extractor = feature_extractor
        self.sampling_rate: int = check_int("sampling_rate", getattr(feature_extractor, "sampling_rate", None))
        model = _audio_part(name)
        self._fixed = _fixed_length(feature_extractor, model.config)
        longest = _SECONDS if self._fixed is None else self._fixed / self.sampling_rate
        self.window = longest if window is None else check_float("window", window, at_least=1e-3)
        self.overlap = check_float("overlap", overlap, at_least=0)
        if self._fixed is not None and self.window > longest:
            raise ConfigError(f"{type(model).__name__} reads {longest:g} s at once, and window is {window}: give less")
        if self.overlap > self.window / 2:
            raise ConfigError(f"overlap must be at most half of the window of {self.window:g} s, got {overlap}")
        self.pooled = pooled
        settings = {
            "encoder": "audio",
            "model": model.config.model_type,
            "features": json.loads(feature_extractor.to_json_string()),
            "window": self.window,
            "overlap": self.overlap,
            "pooled": pooled,
        }
        super().__init__(model, settings, device)
        # Not silence, which has no deviation to be divided by.
        some = torch.linspace(-0.1, 0.1, round(min(self.window, 1.0) * self.sampling_rate))
        try:
            with torch.no_grad():
                self.dim: int = self._states([some])[0].shape[-1]
        except (AttributeError, KeyError, TypeError, ValueError, _TooShortError) as error:
            raise ConfigError(
                f"{type(model).__name__} does not turn sounds alone into states of their times ({error}); name an "
                "audio encoder"
            ) from error

    def forward(
        self,
        sounds: Any,
        *,
        sampling_rate: int | None = None,
        batch_size: int = 8,
        progress: bool = False,
        max_seconds: float = MAX_SECONDS,
        max_clipped: float = MAX_CLIPPED,
    ) -> Memory:
        """The memory (b, m, e) of b sounds, the shorter ones padded; `encode` is the same. Without gradients.

        Windows of one length pass the network together, so that nothing is padded but what the model pads itself.
        `sources` of the memory says which sound, and from which second to which: {"audio": 0, "start": 1.28, "end":
        1.3}, and of spectrograms the "band", counted from the lowest.

        Args:
            sounds: one sound or a list of them, of any kind that `load_audio` reads.
            sampling_rate: of arrays and tensors; by default that of the model. Files say their own.
            batch_size: windows that pass the network at once, and sounds that are in memory at once.
            progress: show the progress on stderr.
            max_seconds: longer sounds are refused; `stream` reads them in pieces.
            max_clipped: as in `load_audio`.

        Raises:
            AudioError: a sound cannot be read, or is too short for one state; the message says which one.
            ConfigError: `batch_size` is no positive int.
        """
        check_int("batch_size", batch_size)
        given, rows, sources = as_sounds(sounds), [], []
        for start in batches(len(given), batch_size, "encoding", progress):
            waves = load_sounds(
                given[start : start + batch_size], self.sampling_rate, source_rate=sampling_rate, first=start,
                max_seconds=max_seconds, max_clipped=max_clipped,
            )  # fmt: skip
            windows = [(number, window) for number, wave in enumerate(waves) for window in self._cut([wave])]
            parts: list[list[tuple[Tensor, list[Any]]]] = [[] for _ in waves]
            for number, tokens, origins in self._encoded(windows, start, batch_size):
                parts[number].append((tokens, origins))
            for number, some in enumerate(parts):
                rows.append(torch.cat([tokens for tokens, _ in some]))
                sources.append([origin for _, origins in some for origin in origins])
                if self.pooled:
                    rows[-1], sources[-1] = rows[-1].mean(0, keepdim=True), [{"audio": start + number}]
        if not rows:
            return Memory(torch.zeros(0, 0, self.dim, dtype=self.dtype, device=self.device))
        memory = Memory.pad(rows)
        named = [row + [None] * (memory.length - len(row)) for row in sources]
        return Memory(memory.tokens, memory.mask, sources=named)

    encode = forward

    def stream(self, pieces: Any, *, sampling_rate: int | None = None) -> Iterator[Memory]:
        """The memory of one sound window by window, as it arrives; the tokens are those of the whole sound.

        Args:
            pieces: waveforms (samples,) that follow each other, or one sound, as for `stream_audio`.
            sampling_rate: of the pieces; by default that of the model.

        Yields:
            Memories (1, n, e) with n of 1 or more, for `MemoryStream.append`.

        Raises:
            AudioError: a piece cannot be read, or all of them are too short for one state.
            ConfigError: an encoder that pools.
        """
        if self.pooled:
            raise ConfigError("pooled states are those of the whole sound; build the encoder without pooled to stream")
        for window in self._cut(stream_audio(pieces, self.sampling_rate, source_rate=sampling_rate)):
            for _, tokens, origins in self._encoded([(0, window)], 0, 1):
                if len(tokens):
                    yield Memory(tokens[None], sources=[origins])

    def _cut(self, pieces: Iterable[Tensor]) -> Iterator[Window]:
        length, overlap = (round(seconds * self.sampling_rate) for seconds in (self.window, self.overlap))
        return cut(pieces, length, overlap)

    @torch.no_grad()
    def _encoded(
        self, windows: list[tuple[int, Window]], first: int, batch_size: int
    ) -> Iterator[tuple[int, Tensor, list[Any]]]:
        """The number, the tokens (m, e) and their sources of each window, in the order of the windows."""
        order = sorted(range(len(windows)), key=lambda i: len(windows[i][1].samples))
        found: dict[int, tuple[Tensor, list[Any]]] = {}
        while order:
            length = len(windows[order[0]][1].samples)
            some = [i for i in order[:batch_size] if len(windows[i][1].samples) == length]
            order = order[len(some) :]
            try:
                states, real = self._states([windows[i][1].samples for i in some])
            except _TooShortError as error:
                raise AudioError(
                    f"sound {first + windows[some[0]][0]} has {length} samples at {self.sampling_rate} Hz, too short "
                    f"for one state of {type(self.model).__name__}; give a longer one"
                ) from error
            timeline = Timeline(self._step(states.shape[1], length), states.shape[2])
            for i, state in zip(some, states, strict=True):
                number, window = windows[i]
                own = timeline.own(window, real)
                sources = timeline.origins(window, own, first + number, self.sampling_rate)
                found[i] = (state[own].flatten(0, 1), sources)
        for i, (number, _) in enumerate(windows):
            yield (number, *found[i])

    def _states(self, waves: list[Tensor]) -> tuple[Tensor, int]:
        """States (n, times, bands, e) of waveforms of one length, and how many times are not padding."""
        samples, config = len(waves[0]), self.model.config
        lengths = getattr(self.model, "_get_feat_extract_output_lengths", None)
        frames = (samples - _AST_FRAME) // _AST_HOP + 1
        if hasattr(config, "time_stride") and frames < 1:
            raise _TooShortError
        inputs = self._features(waves)
        mask = inputs.pop("attention_mask", None)
        if mask is not None and lengths is not None and int(lengths(mask[0].sum())) < 1:
            raise _TooShortError
        if mask is not None and self.feature_extractor.return_attention_mask:
            inputs["attention_mask"] = mask
        try:
            out: Tensor = self.model(**inputs).last_hidden_state
        except RuntimeError as error:
            # What convolutions say of an input that is shorter than they are.
            if "ernel size can't be greater" not in str(error):
                raise
            raise _TooShortError from error
        if out.dim() == 4:
            # CLAP: (n, e, bands, times).
            states = out.permute(0, 3, 2, 1)
        elif hasattr(config, "time_stride"):
            # AST: two tokens of the whole, then the patches, band by band.
            bands = (config.num_mel_bins - config.patch_size) // config.frequency_stride + 1
            states = out[:, 2:].unflatten(1, (bands, -1)).transpose(1, 2)
        else:
            states = out[:, :, None]
        times = states.shape[1]
        if hasattr(config, "time_stride"):
            return states, min(times, math.ceil(frames / config.time_stride))
        if mask is None:
            return states, math.ceil(times * samples / (self._fixed or samples))
        return states, min(times, int(lengths(mask[0].sum()) if lengths is not None else mask[0].sum()))

    def _features(self, waves: list[Tensor]) -> dict[str, Tensor]:
        """What the model reads of waveforms of one length."""
        arrays = [wave.numpy() for wave in waves]
        options = {"sampling_rate": self.sampling_rate, "return_tensors": "pt", "return_attention_mask": True}
        if "is_longer" in self.feature_extractor.model_input_names:
            random = import_extra("numpy", "audio").random
            # CLAP's extractor draws which of several short sounds it calls long; the caller's numbers stay his.
            state = random.get_state()
            try:
                inputs = dict(self.feature_extractor(arrays, **options))
            finally:
                random.set_state(state)
            inputs["is_longer"] = torch.zeros(len(waves), 1, dtype=torch.bool)
        else:
            inputs = dict(self.feature_extractor(arrays, **options))
        return {
            name: value.to(self.device, self.dtype) if value.is_floating_point() else value.to(self.device)
            for name, value in inputs.items()
        }

    def _step(self, times: int, samples: int) -> float:
        """Samples from one state to the next."""
        config = self.model.config
        if hasattr(config, "time_stride"):
            return float(_AST_HOP * config.time_stride)
        ratio = getattr(config, "inputs_to_logits_ratio", None)
        if ratio is not None and not getattr(config, "add_adapter", False):
            return float(ratio)
        return (self._fixed or samples) / times

    def extra_repr(self) -> str:
        return f"dim={self.dim}, sampling_rate={self.sampling_rate}, window={self.window:g}, overlap={self.overlap:g}"


class _TooShortError(Exception):
    """A sound gives no state."""


def _audio_part(model: Any) -> Any:
    """The part of a model that reads sounds, without a head."""
    model = getattr(model, "base_model", model)
    for name in ("audio_model", "audio_tower"):
        if hasattr(model, name):
            return getattr(model, name)
    if not hasattr(model, "config"):
        raise ConfigError(
            f"{type(model).__name__} is no model of transformers; name one, or write an encoder of its own"
        )
    return model.get_encoder() if model.config.is_encoder_decoder and hasattr(model, "get_encoder") else model


def _fixed_length(feature_extractor: Any, config: Any) -> int | None:
    """Samples to which the extractor pads every sound; None where it does not."""
    if hasattr(config, "time_stride"):
        return int((feature_extractor.max_length - 1) * _AST_HOP + _AST_FRAME)
    for name in ("n_samples", "nb_max_samples"):
        if hasattr(feature_extractor, name):
            return int(getattr(feature_extractor, name))
    return None
