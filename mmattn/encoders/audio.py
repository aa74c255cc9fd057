"""Sounds of any kind (paths, bytes, arrays, tensors) as mono waveforms, and their encoders.

Files are read by libsndfile (WAV, FLAC, OGG, MP3, AIFF, CAF …) in pieces, so that a long file never lies in memory at
its own rate and with all its channels; channels are averaged, and the rate is changed by soxr.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard

import torch
from torch import Tensor, nn

from mmattn.encoders.base import FrozenEncoder, Source, as_list, is_array, open_binary, undecoded
from mmattn.errors import AudioError, ConfigError, check_float, check_int, import_extra
from mmattn.memory import Memory
from mmattn.models.loading import load_model, load_part
from mmattn.progress import tracked

if TYPE_CHECKING:
    from soundfile import SoundFile
    from transformers import PreTrainedModel
    from transformers.feature_extraction_utils import FeatureExtractionMixin

SAMPLING_RATE = 16_000
"""Samples in a second that models of speech expect."""
MAX_SECONDS = 7200.0
"""The longest sound that is read at once: 460 MB at 16 kHz."""

#: Largest sample: full scale is 1.
_SCALE = 2.0
#: Missing bytes from which a file counts as cut short: some writers count wrongly.
_SLACK = 64
#: Samples of a sound that are encoded at once, where a model does not say: one minute at 16 kHz.
_BLOCK = 960_000
#: Seconds of a file that are in memory at once.
_PIECE = 10.0

#: Tokens (m, e) of a part of a sound, and the times of each.
Encoded = tuple[Tensor, list[Source]]


class SoundEncoder(FrozenEncoder):
    """Base class of encoders of sounds, which implement `_encode`."""

    sampling_rate: int

    def forward(self, sounds: object, *, progress: bool = False) -> Memory:
        """Return the memory (b, m, e) of b sounds, padded, computed without gradients; `encode` is the same.

        `sources` of the memory gives the sound, start and end in seconds: {"audio": 0, "start": 1.28, "end": 1.3}, and
        for models of spectrograms the "band", counted from the lowest.

        Args:
            sounds: one sound or a list of them, of any kind that `load_audio` reads. Arrays without a rate have that of
                the encoder.
            progress: show the progress on stderr.

        Raises:
            AudioError: a sound cannot be read, is longer than `MAX_SECONDS`, which `stream` reads in pieces, or is too
                short for one token; the message says which one.
        """
        items, rows, sources = sound_list(sounds), [], []
        for number in tracked(len(items), "encoding", progress):
            try:
                wave = load_audio(items[number], self.sampling_rate)
                parts = list(self._encode(wave.split(_BLOCK)))
            except AudioError as error:
                raise AudioError(f"sound {number}: {error}") from error
            rows.append(torch.cat([tokens for tokens, _ in parts]))
            sources.append([{"audio": number, **time} for _, times in parts for time in times])
        return self._padded(rows, sources)

    encode = forward

    def stream(self, pieces: object) -> Iterator[Memory]:
        """Yield the memory of one sound piece by piece, as it arrives; the tokens are those of the whole sound.

        Args:
            pieces: one sound, as for `load_audio`, or an iterable of waveforms (samples,) or (channels, samples) that
                follow each other at the rate of the encoder; with another rate (pieces, sampling rate).

        Yields:
            Memories (1, n, e) with n of 1 or more, for `MemoryStream.append`.

        Raises:
            AudioError: a piece cannot be read, or all of them are too short for one token.
        """
        for tokens, times in self._encode(_resampled(pieces, self.sampling_rate)):
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
        device: device of the network, by default the CPU.

    Attributes:
        dim: width e of the memory.
        feature_extractor: of the model.
        sampling_rate: samples in a second that the model expects; sounds at other rates are resampled.
        window: seconds of a window.

    Raises:
        ConfigError: a setting that is not allowed, or a model that gives no states for sounds.
        AdapterFileError: nothing to load, or weights that are incomplete or not safetensors.
        NonFiniteError: NaN or infinity in the weights.
    """

    model: PreTrainedModel
    _shown = ("dim", "sampling_rate", "window")

    def __init__(
        self,
        name: str | os.PathLike[str] | PreTrainedModel,
        feature_extractor: FeatureExtractionMixin | None = None,
        *,
        window: float | None = None,
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
        settings = {
            "encoder": "audio",
            "model": model.config.model_type,
            "features": json.loads(feature_extractor.to_json_string()),
            "window": self.window,
            "pooled": False,
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
        """Return states (times, bands, e) of a waveform without its padding, and the samples between two states."""
        inputs = self._features(wave)
        mask = inputs.pop("attention_mask", None)
        lengths = getattr(self.model, "_get_feat_extract_output_lengths", None)
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
        ConfigError: a setting that is not allowed, or a band without any frequency.

    >>> encoder = LogMelEncoder(n_mels=40)
    >>> memory = encoder([torch.zeros(16000), torch.zeros(4000)])
    >>> memory.tokens.shape, memory.lengths, memory.sources[1][1]
    (torch.Size([2, 25, 160]), [25, 7], {'audio': 1, 'start': 0.04, 'end': 0.08})
    """

    _shown = ("dim", "sampling_rate", "frames_per_token")

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


def load_audio(source: object, sampling_rate: int = SAMPLING_RATE) -> Tensor:
    """Read one sound as a mono waveform (samples,), float32 with full scale 1, at a sampling rate.

    Args:
        source: path, bytes, open binary file, array or tensor (samples,) or (channels, samples), a tuple (array,
            sampling rate), or a value of an `Audio` column of `datasets`: a dict {"array": …, "sampling_rate": …} or
            {"bytes": …, "path": …}, or a decoder of torchcodec. Integers are scaled by their range.
        sampling_rate: samples in a second of the result, and of an array without a rate.

    Raises:
        AudioError: `source` is no sound, is damaged, cut short, empty, too long, or has NaN.
        ConfigError: a setting that is not allowed.
        MissingExtraError: soundfile is not installed, or soxr, and they are needed.

    >>> load_audio((torch.zeros(2, 441), 44100), 16000).shape
    torch.Size([160])
    """
    return torch.cat(list(_resampled(source, sampling_rate, MAX_SECONDS)))


def _resampled(source: object, sampling_rate: int, max_seconds: float = math.inf) -> Iterator[Tensor]:
    """Yield one sound as pieces (samples,) of its waveform, which follow each other without a gap.

    Only a piece of a file is in memory at once. Arguments as for `load_audio`; `source` may also be an iterable of
    arrays or tensors, the pieces of one sound as they arrive.
    """
    check_int("sampling_rate", sampling_rate)
    with ExitStack() as stack:
        name, rate, pieces = _opened(source, sampling_rate, stack)
        change = None
        if rate != sampling_rate:
            change = import_extra("soxr", "audio").ResampleStream(rate, sampling_rate, 1, dtype="float32", quality="HQ")
        total = 0
        for piece in pieces:
            mono = _mono(piece, name, total / rate)
            total += len(mono)
            if total > max_seconds * rate:
                raise AudioError(
                    f"{name} is longer than {max_seconds:g} seconds; cut it, or read it by `stream` of an encoder"
                )
            yield mono if change is None else torch.from_numpy(change.resample_chunk(mono.numpy()))
        if not total:
            raise AudioError(f"{name} has no samples")
        if change is not None:
            yield torch.from_numpy(change.resample_chunk(torch.zeros(0).numpy(), last=True))


def sound_list(sounds: object) -> list[object]:
    """Return one sound, an iterable of sounds, or an array (b, channels, samples) as a list."""
    if _has_rate(sounds):
        return [sounds]
    return as_list(sounds, "sound", AudioError, batch_dims=3, single=(Mapping,))


def _has_rate(sound: object) -> TypeGuard[tuple[object, int]]:
    """Return True for (array or pieces, sampling rate); soundfile and torchaudio read a file as the former."""
    return isinstance(sound, tuple) and len(sound) == 2 and isinstance(sound[1], int)


def _opened(source: Any, source_rate: int, stack: ExitStack) -> tuple[str, int, Iterator[Tensor]]:
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
    if _has_rate(source):
        source, source_rate = source
    check_int("sampling_rate", source_rate)
    if is_array(source):
        name, samples = _of_array(source)
        return name, source_rate, iter([samples])
    is_file = isinstance(source, (str, bytes, bytearray, memoryview)) or hasattr(source, "read")
    if isinstance(source, Iterable) and not is_file:
        return "the stream", source_rate, (_of_array(piece)[1] for piece in source)
    file, name = stack.enter_context(open_binary(source, "sound", AudioError))
    sound = stack.enter_context(_sound_file(file, name))
    return name, sound.samplerate, _file_pieces(sound, name, max(1, round(_PIECE * sound.samplerate)))


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
