"""Time series as a memory, without any weights: patches with their observed values, scale and position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from mmattn.encoders.base import FrozenEncoder, Source, as_list
from mmattn.errors import ConfigError, NonFiniteError, ShapeError, check_choice, check_int
from mmattn.memory import Memory
from mmattn.progress import tracked

_NORMALIZATIONS = ("series", "running")
#: Share of the mean that is added to deviations, so that noise of constant series stays small.
_SMALL = 1e-5


class SeriesEncoder(FrozenEncoder):
    """Time series of several channels as a memory (b, m, e), one token for each patch (PatchTST, arXiv 2211.14730).

    A token holds, in this order: the normalised values of its patch, time step by time step; for each value 1 if it was
    observed and 0 if not (then the value is 0, too); for each channel the inverse hyperbolic sine of the mean and of
    the deviation of the normalisation; and sines and cosines of the number of the patch. NaN is a value that was not
    observed. A patch without any observed value is masked.

    Args:
        patch_length: time steps of a patch; the last patch may be incomplete.
        channels: of the series.
        normalization: by the mean and deviation of each channel over the whole "series"; or "running", over
            the values observed up to the end of the patch, which can be streamed.
        position_features: sines and cosines of the number of the patch, with wavelengths from 2π to 20000π patches;
            even, 0 for none.
        device: where it is computed, by default the CPU.

    Attributes:
        dim: width e of the memory: 2 × patch_length × channels + 2 × channels + position_features.

    Raises:
        ConfigError: a setting that is not allowed.

    >>> encoder = SeriesEncoder(patch_length=4, channels=3)
    >>> memory = encoder([torch.randn(10, 3), torch.randn(5, 3)])
    >>> memory.tokens.shape, memory.lengths, memory.sources[1]
    (torch.Size([2, 3, 38]), [3, 2], [{'series': 1, 'start': 0, 'end': 4}, {'series': 1, 'start': 4, 'end': 5}, None])
    """

    _shown = ("dim", "patch_length", "channels")

    def __init__(
        self,
        patch_length: int = 16,
        channels: int = 1,
        *,
        normalization: str = "series",
        position_features: int = 8,
        device: str | torch.device | None = None,
    ) -> None:
        self.patch_length, self.channels = check_int("patch_length", patch_length), check_int("channels", channels)
        self.normalization = check_choice("normalization", normalization, _NORMALIZATIONS)
        if check_int("position_features", position_features, at_least=0) % 2:
            raise ConfigError(f"position_features must be even, a sine and a cosine each; got {position_features}")
        self.position_features = position_features
        settings = {
            "encoder": "series", "patch_length": patch_length, "channels": channels, "normalization": normalization,
            "position_features": position_features,
        }  # fmt: skip
        super().__init__(None, settings, device)
        self.dim = 2 * channels * (patch_length + 1) + position_features

    def forward(self, series: object, *, progress: bool = False) -> Memory:
        """Return the memory (b, m, e) of b series, the shorter ones padded; `encode` is the same.

        `sources` of the memory gives series, first time step and end: {"series": 0, "start": 16, "end": 32}.

        Args:
            series: an array or tensor (b, length, channels), or a list of those (length, channels) or, of one channel,
                (length,); NaN where nothing was observed.
            progress: show the progress on stderr.

        Raises:
            ShapeError: a series of other channels, or empty; the message says which one.
            NonFiniteError: infinity in a series.
        """
        items = as_list(series, "series", ShapeError, batch_dims=3)
        rows, masks, sources = [], [], []
        for number in tracked(len(items), "encoding", progress):
            values = self._checked(items[number], f"series {number}")
            tokens, observed = self._tokens(values, _Past(self.channels))
            rows.append(tokens)
            masks.append(observed)
            sources.append(self._origins(number, 0, len(values)))
        memory = self._padded(rows, sources)
        if not rows:
            return memory
        mask = nn.utils.rnn.pad_sequence(masks, batch_first=True)
        return Memory(memory.tokens, None if bool(mask.all()) else mask.to(memory.device), sources=memory.sources)

    encode = forward

    def stream(self, pieces: Iterable[object]) -> Iterator[Memory]:
        """Yield the memory of one series piece by piece, as it arrives.

        The tokens are those of the whole series, without patches in which nothing was observed: a stream has no masked
        slots.

        Args:
            pieces: arrays or tensors (n, channels) or, of one channel, (n,), that follow each other.

        Yields:
            Memories (1, n, e) with n of 1 or more, for `MemoryStream.append`.

        Raises:
            ConfigError: a normalization over the whole series.
            ShapeError: a piece of other channels.
            NonFiniteError: infinity in a piece.

        >>> encoder = SeriesEncoder(patch_length=4, normalization="running")
        >>> [memory.length for memory in encoder.stream([torch.randn(3), torch.randn(6), torch.randn(1)])]
        [2, 1]
        """
        if self.normalization == "series":
            raise ConfigError(
                "normalization 'series' needs the whole series; build the encoder with 'running' to stream"
            )
        past, start, waiting = _Past(self.channels), 0, torch.zeros(0, self.channels, dtype=torch.float64)
        for number, piece in enumerate(pieces):
            waiting = torch.cat([waiting, self._checked(piece, f"piece {number}", empty=True)])
            whole = len(waiting) // self.patch_length * self.patch_length
            if whole:
                yield from self._arrived(waiting[:whole], start, past)
                start, waiting = start + whole, waiting[whole:]
        if len(waiting):
            yield from self._arrived(waiting, start, past)

    def _arrived(self, values: Tensor, start: int, past: _Past) -> Iterator[Memory]:
        tokens, observed = self._tokens(values, past, start // self.patch_length)
        sources = self._origins(0, start, start + len(values))
        if observed.any():
            yield Memory(tokens[observed][None], sources=[[sources[i] for i in observed.nonzero()[:, 0].tolist()]])

    def _checked(self, series: object, name: str, empty: bool = False) -> Tensor:
        """Return values (length, channels) in float64, NaN where nothing was observed."""
        try:
            values = series.detach().cpu() if isinstance(series, Tensor) else torch.as_tensor(series)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError(f"{name} is no array of numbers (length, {self.channels}): {error}") from error
        if values.dim() == 1 and self.channels == 1:
            values = values[:, None]
        if values.dim() != 2 or values.shape[1] != self.channels or values.is_complex():
            raise ShapeError(f"{name} must be (length, {self.channels}), got {tuple(values.shape)}")
        if not len(values) and not empty:
            raise ShapeError(f"{name} is empty; leave it out, or give NaN for missing values")
        values = values.double()
        if values.isinf().any():
            step = int(values.isinf().any(1).nonzero()[0])
            raise NonFiniteError(f"{name} has infinity at time step {step}; give NaN where nothing was observed")
        return values

    @torch.no_grad()
    def _tokens(self, values: Tensor, past: _Past, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return tokens (m, e) of values (length, channels), and the mask (m,) of patches with observed values."""
        missing = -len(values) % self.patch_length
        patches = nn.functional.pad(values, (0, 0, 0, missing), value=math.nan).view(
            -1, self.patch_length, self.channels
        )
        observed = ~patches.isnan()
        filled = patches.where(observed, 0.0)
        if self.normalization == "running":
            mean, deviation = past.add(filled, observed)
        else:
            statistics = past.add(filled.flatten(0, 1)[None], observed.flatten(0, 1)[None])
            mean, deviation = (value.expand(len(patches), -1) for value in statistics)
        scale = deviation + _SMALL * mean.abs()
        normal = (filled - mean[:, None]) / torch.where(scale > 0, scale, 1.0)[:, None]
        parts = [
            normal.where(observed, 0.0).flatten(1),
            observed.to(mean).flatten(1),
            mean.asinh(),
            deviation.asinh(),
            self._positions(torch.arange(first, first + len(patches))),
        ]
        return torch.cat(parts, 1).to(self.device, self.dtype), observed.flatten(1).any(1)

    def _positions(self, numbers: Tensor) -> Tensor:
        """Return sines and cosines (n, position_features) of the numbers of patches (n,), in float64."""
        count = self.position_features // 2
        frequencies = 1.0 / 10000.0 ** (torch.arange(count, dtype=torch.float64) / max(count, 1))
        angles = numbers.double()[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], 1)

    def _origins(self, series: int, start: int, stop: int) -> list[Source]:
        starts = range(start, stop, self.patch_length)
        return [{"series": series, "start": first, "end": min(first + self.patch_length, stop)} for first in starts]


class _Past:
    """Mean and deviation of each channel over the values so far, by Chan's update of sums of squares."""

    def __init__(self, channels: int) -> None:
        self.count, self.mean, self.squares = (torch.zeros(channels, dtype=torch.float64) for _ in range(3))

    def add(self, patches: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and deviations (m, channels) up to the end of each patch (m, patch_length, channels)."""
        means, deviations = [], []
        for patch, mask in zip(patches, observed, strict=True):
            count = mask.sum(0).double()
            mean = patch.sum(0) / count.clamp_min(1)
            squares = ((patch - mean) * mask).square().sum(0)
            total, difference = self.count + count, mean - self.mean
            share = count / total.clamp_min(1)
            self.mean = self.mean + difference * share
            self.squares = self.squares + squares + difference.square() * self.count * share
            self.count = total
            means.append(self.mean)
            deviations.append((self.squares / total.clamp_min(1)).sqrt())
        return torch.stack(means), torch.stack(deviations)
