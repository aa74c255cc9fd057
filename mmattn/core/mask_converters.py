"""Masks of other libraries as boolean tensors, True = may look; the values are checked where they can be read."""

from __future__ import annotations

import torch
from torch import Tensor

from mmattn.core.tracing import readable
from mmattn.errors import MaskError

#: Added to a score, this or less hides its slot in other libraries.
_DROPPED = -9000.0


def from_huggingface(mask: Tensor) -> Tensor:
    """A transformers `attention_mask` (1 = keep, 0 = drop; int, float or bool) as bool, True = may look.

    Args:
        mask: of any shape.

    Raises:
        MaskError: values other than 0 and 1, or not a tensor.

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
    """A mask that is added to the scores (0 = keep, -10000 or less = drop) as bool, True = may look.

    Args:
        mask: float, of any shape.

    Raises:
        MaskError: not a float tensor, or values that are neither: those are a bias, not a mask.

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
    """A `key_padding_mask` or bool `attn_mask` of nn.MultiheadAttention (True = drop) as bool, True = may look.

    Args:
        mask: bool, of any shape.

    Raises:
        MaskError: not boolean.

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
