"""Which text a host is reading: all of it, although each forward is handed only the piece that is not cached."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.errors import ConditionError

if TYPE_CHECKING:
    from mmattn.hosts.language import LanguageModel


@dataclass(frozen=True)
class Text:
    """A text up to the end of a piece: which of its tokens are real (b, t) bool, and their ids (b, t) where known."""

    real: Tensor
    ids: Tensor | None


def text_of(kwargs: dict[str, Any], input_ids: Tensor | None, past: int | None) -> Text:
    """The text that the arguments of one forward tell of.

    Raises:
        ConditionError: they do not tell how much text went before, or which of it is padding.
    """
    piece = input_ids if input_ids is not None else kwargs["inputs_embeds"]
    rows, length = piece.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None and past is not None:
        real = torch.ones(rows, past + length, dtype=torch.bool, device=piece.device)
    elif isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == (past or 0) + length and past is not None:
        real = mask.bool()
    else:
        given = f"of {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ConditionError(
            f"chunks are counted over all real tokens: this piece has {length} tokens after "
            f"{'an unknown number' if past is None else past} in the cache, and attention_mask is {given}; give it as "
            "(b, all tokens so far), or use generate"
        )
    return Text(real, input_ids if past == 0 else None)


def past_length(kwargs: dict[str, Any]) -> int | None:
    """How many tokens the host has in its cache, or None where it does not say."""
    cache = kwargs.get("past_key_values")
    if cache is not None:
        return int(cache.get_seq_length())
    return None if kwargs.get("cache_params") is not None else 0


def refuse_packed(kwargs: dict[str, Any]) -> None:
    """Several documents in one row would all see the memory of that row.

    Raises:
        ConditionError: positions start again inside a row, or the call says that it is packed.
    """
    packed = any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "cu_seqlens", "seq_idx"))
    positions = kwargs.get("position_ids")
    if positions is not None and positions.dim() == 2 and positions.shape[1] > 1 and not torch.compiler.is_compiling():
        mask = kwargs.get("attention_mask")
        real = torch.ones_like(positions, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= positions.shape[1]:
            real = mask[:, -positions.shape[1] :].bool().expand(positions.shape)
        both = real[:, 1:] & real[:, :-1]
        packed = packed or bool(((positions[:, 1:] <= positions[:, :-1]) & both).any())
    if packed:
        raise ConditionError(
            "positions start again inside a row: several documents share it and would all see the memory of that row. "
            "Give each document a row of its own (pad instead of packing)"
        )


class NotingTexts:
    """What `host.prepare_inputs_for_generation` is where chunks are read: the call under way learns the whole text.

    Nowhere else do beams, drafts and pieces of a prompt appear in full.
    """

    def __init__(self, handle: LanguageModel) -> None:
        self.handle = handle
        # generate asks the signature what it may pass on.
        self.__signature__ = inspect.signature(self._own)

    @property
    def _own(self) -> Any:
        host: Any = self.handle.host
        return type(host).prepare_inputs_for_generation.__get__(host)

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = self.handle._current()
        if call is not None:
            mask = kwargs.get("attention_mask")
            if mask is None:
                mask = torch.ones_like(input_ids)
            call.next_text = Text(mask.bool(), whole(input_ids, call.prompt, mask.shape))
        return self._own(input_ids, *args, **kwargs)


def whole(input_ids: Tensor, prompt: Tensor | None, size: torch.Size) -> Tensor | None:
    """The ids of a text of this size (b, t): those at hand, or the start of the prompt while it is read in pieces."""
    if input_ids.shape == size:
        return input_ids
    if prompt is None or size[1] > prompt.shape[1]:
        return None
    return prompt[:, : size[1]].repeat_interleave(size[0] // prompt.shape[0], 0)
