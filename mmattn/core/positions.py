"""Positions of queries and slots: sinusoidal and learned vectors, rotation of heads, ALiBi.

Positions are always given, never guessed from the shape: a memory has no natural order, and a cached text does not
start at 0.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn

from mmattn.core.tracing import readable
from mmattn.errors import ConfigError, ShapeError, check_float, check_int


def sinusoidal(positions: Tensor, dim: int) -> Tensor:
    """Fixed position vectors (…, dim) in float32 (arXiv 1706.03762, section 3.5): sine and cosine in turn.

    >>> sinusoidal(torch.tensor([0, 1]), 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    check_int("dim", dim, at_least=2)
    if dim % 2:
        raise ConfigError(f"dim must be even, a sine and a cosine per frequency; got {dim}")
    _check_numbers(positions)
    # Float32 angles of a few thousand radians are off in the fourth digit; MPS has no float64.
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    angles = positions.to(exact)[..., None] * _frequencies(dim // 2, 10000.0, positions.device, exact)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


class Learned(nn.Module):
    """A trained vector for each of `num` positions.

    >>> Learned(7, 5)(torch.tensor([[0, 6]])).shape
    torch.Size([1, 2, 5])
    """

    def __init__(self, num: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(check_int("num", num), check_int("dim", dim)))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """Vectors (…, dim) of `positions` (…), ints from 0 to num - 1."""
        _check_numbers(positions)
        if positions.is_floating_point():
            raise ConfigError(f"learned positions must be ints, got {positions.dtype}")
        num = self.weight.shape[0]
        # A raise that depends on data would break a compiled graph.
        if readable(positions) and positions.numel():
            low, high = (int(end) for end in positions.aminmax())
            if low < 0 or high >= num:
                raise ShapeError(
                    f"positions must lie in 0…{num - 1}, the {num} learned ones; got {low}…{high}. "
                    "Build Learned with a larger num"
                )
        return nn.functional.embedding(positions, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class Rotary(nn.Module):
    """Rotates each pair of head channels by its position (arXiv 2104.09864), in Llama's half-split layout.

    Channel i is paired with channel i + k/2. With `axes` 2 the first half of the pairs turns by the row, the second
    half by the column, each half with its own full range of frequencies; with 3 there are a third each for the time,
    the row and the column of videos.

    Args:
        head_dim: k, a multiple of 2 × axes.
        base: wavelength of the slowest pair, over 2π.
        axes: coordinates per position, 1 for a line, 2 for a grid, 3 for a video.

    Raises:
        ConfigError: a `head_dim` that does not split into pairs per axis, or a `base` of 0 or less.

    >>> turn = Rotary(4)
    >>> turn(torch.ones(1, 1, 2, 4), torch.tensor([0, 1]))[0, 0]
    tensor([[ 1.0000,  1.0000,  1.0000,  1.0000],
            [-0.3012,  0.9900,  1.3818,  1.0099]])
    """

    def __init__(self, head_dim: int, base: float = 10000.0, axes: int = 1) -> None:
        super().__init__()
        self.head_dim = check_int("head_dim", head_dim, at_least=2)
        self.axes = check_int("axes", axes)
        self.base = check_float("base", base)
        if self.base <= 0:
            raise ConfigError(f"base must be above 0, got {base}")
        if head_dim % (2 * axes):
            raise ConfigError(
                f"head_dim must be a multiple of {2 * axes} (pairs of channels for {axes} axes), got {head_dim}"
            )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` rotated, in its own dtype; computed in float32 (float64 for float64)."""
        self._check(x, positions)
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        places = positions.to(exact)
        if self.axes == 1:
            places = places[..., None]
        # The frequencies are made on the spot: a buffer would be rounded by .half().
        turn = _frequencies(self.head_dim // (2 * self.axes), self.base, positions.device, exact)
        angles = (places[..., None] * turn).flatten(-2)
        if angles.dim() == 3:
            angles = angles[:, None]
        cos, sin = angles.cos().to(x.device), angles.sin().to(x.device)
        first, second = x.to(exact).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def _check(self, x: Tensor, positions: Tensor) -> None:
        _check_numbers(positions)
        if x.dim() != 4 or x.shape[-1] != self.head_dim:
            raise ShapeError(f"x must be (b, h, l, {self.head_dim}), got {tuple(x.shape)}")
        b, _, l, _ = x.shape
        axes = (self.axes,) if self.axes > 1 else ()
        if tuple(positions.shape) not in ((l, *axes), (b, l, *axes), (1, l, *axes)):
            raise ShapeError(
                f"positions must be {(l, *axes)} or {(b, l, *axes)} for x {tuple(x.shape)} and {self.axes} "
                f"{'axis' if self.axes == 1 else 'axes'}, got {tuple(positions.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}, axes={self.axes}"


def grid(height: int, width: int) -> Tensor:
    """Row and column of each patch of a picture, (height × width, 2), row by row.

    >>> grid(2, 3).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """
    rows, columns = torch.arange(check_int("height", height)), torch.arange(check_int("width", width))
    return torch.cartesian_prod(rows, columns)


def alibi_slopes(h: int) -> Tensor:
    """ALiBi's slope of each head, (h,) in float32 (arXiv 2108.12409, section 3).

    For h a power of two the slopes are 2^(-8/h), 2^(-16/h), … 2^-8. Otherwise, as in the paper's code, those of the
    power of two below come first and every other one of the next power of two fills the rest.

    >>> alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    below = 2 ** int(math.log2(check_int("h", h)))
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (h - below), 2)]
    return torch.tensor(slopes)


def alibi(h: int, l: int, m: int, offset: int = 0) -> Tensor:
    """ALiBi's bias on the scores, (h, l, m): each head's slope times minus the distance of slot j from i + offset.

    Slots ahead of a query count like those behind it; a mask decides whether they are visible.

    >>> alibi(1, 2, 3, offset=1) * 256
    tensor([[[-1., -0., -1.],
             [-2., -1., -0.]]])
    """
    check_int("l", l, at_least=0)
    check_int("m", m, at_least=0)
    check_int("offset", offset, at_least=-sys.maxsize)
    distance = (torch.arange(l)[:, None] + offset - torch.arange(m)).abs()
    return -alibi_slopes(h)[:, None, None] * distance


def _frequencies(pairs: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """1 / base^(i / pairs) for i below `pairs`."""
    return 1.0 / base ** (torch.arange(pairs, device=device, dtype=dtype) / pairs)


def _check_numbers(positions: object) -> None:
    if not isinstance(positions, Tensor):
        raise ConfigError(f"positions must be a tensor, got {type(positions).__name__}")
    if positions.dtype == torch.bool or positions.is_complex():
        raise ConfigError(f"positions must be ints or floats, got {positions.dtype}")


def token_positions(mask: Tensor) -> Tensor:
    """Positions (b, l) of the real tokens of a padded text, counted from the first one; padding gets 0.

    Give them as `position_ids` to hosts with absolute positions (GPT-2, OPT …) when a left-padded batch goes through a
    plain forward; `generate` does so by itself.

    >>> token_positions(torch.tensor([[False, False, True, True, True]]))
    tensor([[0, 0, 0, 1, 2]])
    """
    return (mask.cumsum(-1, dtype=torch.long) - 1).clamp(min=0)
