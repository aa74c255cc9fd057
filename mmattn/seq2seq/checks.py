"""Checks of the ids and the memory that an `EncoderDecoder` is given, made before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmattn.core.kv_cache import KeyValue
from mmattn.core.tracing import may_read
from mmattn.errors import ShapeError, check_bool_mask
from mmattn.memory import Memory


def check_memory(memory: Memory | Sequence[KeyValue], rows: int, dim: int, layers: int) -> None:
    """Refuse a memory that does not fit a target."""
    if isinstance(memory, Memory):
        held, fits, given = memory.batch, memory.dim == dim, f"a memory of width {memory.dim}"
    else:
        held = memory[0].batch if len(memory) else 0
        fits, given = len(memory) == layers, f"keys and values of {len(memory)} layers"
    if not fits or (rows != held and (held == 0 or rows % held)):
        raise ShapeError(
            f"a target of {rows} rows reads a memory of as many rows or a divisor of them (beams), of width {dim} or "
            f"prepared for {layers} layers; got {given} and {held} rows"
        )


def check_ids(name: str, ids: Tensor, mask: Tensor | None, vocabulary: int, length: int, limit: int | None) -> None:
    """Refuse ids (b, ·) that are no text of a length, cached tokens included."""
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"{name} must be (b, l) ids, int64 or int32; got {tuple(ids.shape)} {ids.dtype}")
    if not ids.shape[1]:
        raise ShapeError(f"the {name} is empty, {tuple(ids.shape)}: give each row a token at least")
    if mask is not None and check_bool_mask(f"{name}_mask", mask).shape != (len(ids), length):
        raise ShapeError(f"{name}_mask must be {(len(ids), length)}, got {tuple(mask.shape)}")
    if limit is not None and length > limit:
        raise ShapeError(
            f"the {name} has {length} tokens and there are {limit} learned positions: cut it, or build the model with "
            "a larger max_length or with other positions"
        )
    if not may_read(ids) or not len(ids):
        return
    if mask is not None and not bool(mask.any(1).all()):
        raise ShapeError(f"row {int((~mask.any(1)).nonzero()[0])} of the {name} has no token, only padding")
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= vocabulary:
        raise ShapeError(
            f"ids of the {name} must lie in 0…{vocabulary - 1}, its vocabulary; got {low}…{high}: they come from "
            "another tokenizer than the model was made for"
        )
