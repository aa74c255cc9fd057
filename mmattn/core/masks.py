"""Boolean masks of attention, True = may attend: small rules that combine with `&`, `|`, `~` and draw themselves.

A rule is a `Mask` around a tensor that broadcasts to (b, h, l, m): rules over tokens
and slots are (l, m), rules that differ from row to row are (b, 1, l, m) or (b, 1, 1, m), so any two of them combine.
The `from_…` functions turn the masks of other libraries into boolean tensors.

>>> print((causal(4) & padding([4, 2], 4)).draw())
2 rows, 4 queries × 4 slots
row 0
█···
██··
███·
████
row 1
█···
██··
██··
██··
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmattn.core.tracing import readable
from mmattn.errors import ConfigError, MaskError, ShapeError, check_bool_mask, check_choice, check_int

__all__ = [
    "VISIBLE_SEGMENTS",
    "Mask",
    "block",
    "causal",
    "chunk",
    "from_additive",
    "from_huggingface",
    "from_key_padding",
    "media",
    "padding",
    "padding_mask",
    "window",
]

Device = torch.device | str | None

#: Which segments of a memory a token may attend to: all, those begun at or before it, or the last of these.
VISIBLE_SEGMENTS = ("all", "previous", "latest")
#: Added to a score, this or less hides its slot in other libraries.
_DROPPED = -9000.0


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """A boolean rule, True = may attend, that broadcasts to (b, h, l, m).

    Args:
        tensor: (l, m), for every row and head; (b, l, m), for every head, which becomes (b, 1, l, m); or (b, h, l, m).
            A size of 1 stands for all. It is not copied.

    Raises:
        MaskError: `tensor` is not boolean.
        ShapeError: it has fewer than two or more than four dimensions.

    >>> print((causal(4) & ~window(4, 4, size=2)).draw())
    4 queries × 4 slots
    ····
    ····
    █···
    ██··
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        tensor = check_bool_mask("a Mask", self.tensor)
        if not 2 <= tensor.dim() <= 4:
            raise ShapeError(
                f"a Mask takes (l, m), (b, l, m) or (b, h, l, m), got {tuple(tensor.shape)}; "
                "a padding mask (b, m) goes through mmattn.masks.padding_mask"
            )
        if tensor.dim() == 3:
            object.__setattr__(self, "tensor", tensor.unsqueeze(1))

    @property
    def shape(self) -> torch.Size:
        """Sizes of the tensor: (l, m) or (b, h, l, m), where 1 stands for all."""
        return self.tensor.shape

    def to(self, device: torch.device | str) -> Mask:
        """Return the same rule on another device."""
        return Mask(self.tensor.to(device))

    def __and__(self, other: Mask | Tensor) -> Mask:
        return self._join(other, "&", torch.logical_and)

    def __or__(self, other: Mask | Tensor) -> Mask:
        return self._join(other, "|", torch.logical_or)

    __rand__ = __and__
    __ror__ = __or__

    def __invert__(self) -> Mask:
        return Mask(~self.tensor)

    def _join(self, other: Mask | Tensor, sign: str, rule: Callable[[Tensor, Tensor], Tensor]) -> Mask:
        theirs = other if isinstance(other, Mask) else Mask(other)
        try:
            torch.broadcast_shapes(self.shape, theirs.shape)
        except RuntimeError as error:
            raise ShapeError(
                f"cannot combine masks of {tuple(self.shape)} {sign} {tuple(theirs.shape)}: each size must be equal "
                "or 1; build both for the same b, l and m"
            ) from error
        return Mask(rule(self.tensor, theirs.tensor))

    def __repr__(self) -> str:
        return f"Mask{tuple(self.shape)}"

    def draw(self) -> str:
        """Draw the rule as text: one line per query, '█' may attend, '·' may not."""
        grid = self.tensor.reshape((1,) * (4 - self.tensor.dim()) + tuple(self.shape))
        b, h, l, m = grid.shape
        sizes = [_count(b, "row")] * (b > 1) + [_count(h, "head")] * (h > 1)
        lines = [", ".join([*sizes, f"{_count(l, 'query', 'queries')} × {_count(m, 'slot')}"])]
        for row in range(b):
            for head in range(h):
                lines += [", ".join([f"row {row}"] * (b > 1) + [f"head {head}"] * (h > 1))] * (b * h > 1)
                lines += ["".join("█" if allowed else "·" for allowed in query) for query in grid[row, head].tolist()]
        return "\n".join(lines)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def padding(lengths: Tensor | Sequence[int], length: int, *, device: Device = None) -> Mask:
    """A mask of padding by lengths, (b, 1, 1, m): row i may attend to its first `lengths[i]` slots.

    >>> print(padding([2, 4], 4).draw())
    2 rows, 1 query × 4 slots
    row 0
    ██··
    row 1
    ████
    """
    check_int("length", length, at_least=0)
    counts = torch.as_tensor(lengths, device=device)
    if counts.numel() == 0:
        counts = counts.long()
    _check_ints("lengths", counts)
    if counts.dim() != 1:
        raise ShapeError(f"lengths must be (b,), one per row, got {tuple(counts.shape)}")
    if counts.numel() and readable(counts) and not 0 <= int(counts.min()) <= int(counts.max()) <= length:
        raise ShapeError(f"lengths must lie in 0…{length} (length), got {counts.tolist()}")
    return padding_mask(torch.arange(length, device=counts.device) < counts[:, None])


def padding_mask(mask: Tensor) -> Mask:
    """A mask of padding, (b, 1, 1, m): row i may attend where `mask[i]` is True.

    >>> print(padding_mask(torch.tensor([[False, True, True]])).draw())
    1 query × 3 slots
    ·██
    """
    if check_bool_mask("mask", mask).dim() != 2:
        raise ShapeError(f"mask must be (b, m), got {tuple(mask.shape)}")
    return Mask(mask[:, None, None])


def causal(l: int, m: int | None = None, offset: int = 0, *, device: Device = None) -> Mask:
    """A causal mask, (l, m): query i may attend to slots up to i + offset.

    >>> print(causal(3, offset=2).draw())
    3 queries × 5 slots
    ███··
    ████·
    █████
    """
    slots, ends = _places(l, m, offset, device)
    return Mask(slots <= ends)


def window(l: int, m: int | None, size: int, offset: int = 0, *, device: Device = None) -> Mask:
    """A causal mask over a window, (l, m): query i may attend to the last `size` slots up to i + offset.

    >>> print(window(4, 4, size=2).draw())
    4 queries × 4 slots
    █···
    ██··
    ·██·
    ··██
    """
    check_int("size", size)
    slots, ends = _places(l, m, offset, device)
    return Mask((slots <= ends) & (slots > ends - size))


def _places(l: int, m: int | None, offset: int, device: Device) -> tuple[Tensor, Tensor]:
    """Return the slots (m,), and for each query the last slot it may attend to (l, 1)."""
    check_int("l", l, at_least=0)
    check_int("offset", offset, at_least=-sys.maxsize)
    m = l + max(offset, 0) if m is None else check_int("m", m, at_least=0)
    return torch.arange(m, device=device), torch.arange(offset, offset + l, device=device)[:, None]


def chunk(
    l: int, chunk_size: int, neighbour_length: int, chunks: int | None = None, *, offset: int = 0, device: Device = None
) -> Mask:
    """The mask of RETRO's shifted chunks (arXiv 2112.04426, section 2.4), (l, m).

    A token attends to the neighbours of the last finished chunk. The memory is (chunks × neighbour_length) slots in
    order: the last token of chunk c, up to the second to last of chunk c + 1, may attend to the neighbours of chunk c.

    Args:
        l: tokens.
        chunk_size: tokens per chunk.
        neighbour_length: slots per chunk, all its neighbours together (n × r).
        chunks: chunks in memory; the finished ones unless given. Tokens of a chunk beyond them see nothing.
        offset: tokens before the first one (a cache).
        device: of the mask.

    Raises:
        ConfigError: sizes that are not ints, or too small.

    >>> print(chunk(6, chunk_size=2, neighbour_length=3).draw())
    6 queries × 9 slots
    ·········
    ███······
    ███······
    ···███···
    ···███···
    ······███
    """
    check_int("l", l, at_least=0)
    check_int("chunk_size", chunk_size)
    check_int("neighbour_length", neighbour_length)
    check_int("offset", offset, at_least=0)
    chunks = (offset + l) // chunk_size if chunks is None else check_int("chunks", chunks, at_least=0)
    finished = (torch.arange(l, device=device) + offset + 1) // chunk_size
    owner = torch.arange(chunks * neighbour_length, device=device) // neighbour_length
    return Mask(owner == finished[:, None] - 1)


def block(query_ids: Tensor, memory_ids: Tensor) -> Mask:
    """A mask of documents that share a row, (b, 1, l, m): queries may attend to slots of their own document.

    >>> ids = torch.tensor([[0, 0, 1, 1, 1, -1]])
    >>> print((block(ids, ids) & causal(6)).draw())
    6 queries × 6 slots
    █·····
    ██····
    ··█···
    ··██··
    ··███·
    ······
    """
    _check_pair("query_ids", query_ids, "memory_ids", memory_ids)
    same = query_ids[:, :, None] == memory_ids[:, None]
    return Mask((same & (memory_ids >= 0)[:, None])[:, None])


def media(images: Tensor, segments: Tensor, visible_segments: str = "latest") -> Mask:
    """A mask of the images that each token sees, (b, 1, l, m) (Flamingo, arXiv 2204.14198, section 2.3).

    >>> images, segments = torch.tensor([[0, 1, 1, 2, 2]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    >>> print(media(images, segments).draw())
    5 queries × 6 slots
    ······
    ███···
    ███···
    ···███
    ···███
    """
    check_choice("visible_segments", visible_segments, VISIBLE_SEGMENTS)
    _check_pair("images", images, "segments", segments)
    begun, owner = images[:, :, None] - 1, segments[:, None]
    if visible_segments == "all":
        visible = torch.ones_like(begun, dtype=torch.bool)
    else:
        visible = owner == begun if visible_segments == "latest" else owner <= begun
    return Mask((visible & (owner >= 0))[:, None])


def from_huggingface(mask: Tensor) -> Tensor:
    """Convert a transformers `attention_mask` (1 = keep, 0 = drop; int, float or bool) to bool, True = may attend.

    >>> from_huggingface(torch.tensor([[0, 1, 1]]))
    tensor([[False,  True,  True]])
    """
    _check_tensor("from_huggingface", mask)
    if mask.dtype == torch.bool:
        return mask
    keep = mask == 1
    if readable(mask) and not bool((keep | (mask == 0)).all()):
        raise MaskError(
            "from_huggingface reads 1 = keep and 0 = drop, got other values; "
            "a mask that is added to the scores (0 = keep, -inf = drop) goes through from_additive"
        )
    return keep


def from_additive(mask: Tensor) -> Tensor:
    """Convert a float mask that is added to the scores (0 = keep, -10000 or less = drop) to bool, True = may attend.

    >>> from_additive(torch.tensor([[0.0, float("-inf"), -10000.0]]))
    tensor([[ True, False, False]])
    """
    _check_tensor("from_additive", mask)
    if not mask.is_floating_point():
        raise MaskError(
            f"from_additive reads floats, 0 = keep and -inf = drop; got {_dtype(mask)}. "
            "For 1 = keep use from_huggingface, for a bool with True = drop from_key_padding"
        )
    keep = mask == 0
    if readable(mask) and not bool((keep | (mask <= _DROPPED)).all()):
        raise MaskError(
            "from_additive reads 0 = keep and -10000 or less = drop, got other values; "
            "for 1 = keep use from_huggingface, and pass a bias on the scores as bias="
        )
    return keep


def from_key_padding(mask: Tensor) -> Tensor:
    """Convert a `key_padding_mask` or bool `attn_mask` of nn.MultiheadAttention (True = drop) to True = may attend.

    >>> from_key_padding(torch.tensor([[True, False, False]]))
    tensor([[False,  True,  True]])
    """
    _check_tensor("from_key_padding", mask)
    if mask.dtype != torch.bool:
        raise MaskError(
            f"from_key_padding reads a bool tensor, True = drop; got {_dtype(mask)}. "
            "For floats added to the scores use from_additive, for 1 = keep from_huggingface"
        )
    return ~mask


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_tensor(name: str, mask: object) -> None:
    if not isinstance(mask, Tensor):
        raise MaskError(f"{name} takes a tensor, got {type(mask).__name__}")


def _check_ints(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} must be a tensor of ints, got {type(tensor).__name__}")
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise ConfigError(f"{name} must be ints, got {str(tensor.dtype).removeprefix('torch.')}")


def _check_pair(query_name: str, queries: Tensor, memory_name: str, slots: Tensor) -> None:
    _check_ints(query_name, queries)
    _check_ints(memory_name, slots)
    if queries.dim() != 2 or slots.dim() != 2 or queries.shape[0] != slots.shape[0]:
        raise ShapeError(
            f"{query_name} must be (b, l) and {memory_name} (b, m) with the same b, "
            f"got {tuple(queries.shape)} and {tuple(slots.shape)}"
        )
