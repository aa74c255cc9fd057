"""Which text a host is reading: all of it, although each forward is handed only the piece that is not cached."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConditionError

if TYPE_CHECKING:
    from mmattn.hosts.calls import Call
    from mmattn.hosts.causal_lm.model import AdaptedCausalLM


@dataclass(frozen=True)
class Text:
    """A text up to the end of a piece: which of its tokens are real (b, t) bool, and their ids (b, t) where known."""

    real: Tensor
    ids: Tensor | None


@dataclass(frozen=True)
class Noted:
    """What `generate` is about to hand to the host: ids (b, any) and padding (b, t), None where every token is real."""

    ids: Tensor
    mask: Tensor | None


def text_of(call: Call, piece: Tensor, kwargs: dict[str, Any]) -> Text:
    """The text that ends with the piece (b, l) of ids or (b, l, d) of embeddings which the host is given now.

    Raises:
        ConditionError: it is not told how much text went before, or which of it is padding.
    """
    noted, call.next_noted = call.next_noted, None
    rows, length = piece.shape[:2]
    past, prompt = past_length(kwargs), call.prompt
    mask = kwargs.get("attention_mask") if noted is None else noted.mask
    total = None if past is None else past + length
    if total is None and noted is not None:
        embedded = 0 if prompt is None or not prompt.is_floating_point() else prompt.shape[1]
        total = embedded + noted.ids.shape[1]
    if mask is None and total is not None:
        real = torch.ones(rows, total, dtype=torch.bool, device=piece.device)
    elif isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == total:
        real = mask.bool()
    else:
        given = f"of {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ConditionError(
            f"which tokens of the whole text are real must be told: this piece has {length} tokens after "
            f"{'an unknown number' if past is None else past} in the cache, and attention_mask is {given}; give it as "
            "(b, all tokens so far), or use generate"
        )
    ids = piece if noted is None else noted.ids
    if noted is not None and ids.shape[1] != total and prompt is not None:
        # A prompt that is read in pieces is noted piece by piece.
        ids = prompt[:, :total].repeat_interleave(rows // prompt.shape[0], 0)
    return Text(real, ids if ids.shape == real.shape and not ids.is_floating_point() else None)


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


def inner_host(host: nn.Module) -> nn.Module:
    """The model that peft has wrapped, or the host itself."""
    base: Any = getattr(host, "get_base_model", None)
    return host if base is None else base()


class NotingTexts:
    """What `prepare_inputs_for_generation` is where chunks are read: the call under way learns the whole text from it.

    Nowhere else do beams, drafts and pieces of a prompt appear in full.
    """

    def __init__(self, handle: AdaptedCausalLM, host: Any) -> None:
        self.handle, self.host = handle, host
        # generate asks the signature what it may pass on.
        self.__signature__ = inspect.signature(host.prepare_inputs_for_generation)

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = self.handle._current()
        if call is not None:
            mask = kwargs.get("attention_mask")
            call.next_noted = Noted(input_ids, None if mask is None else mask.bool())
        return type(self.host).prepare_inputs_for_generation(self.host, input_ids, *args, **kwargs)


def note_texts(handle: AdaptedCausalLM, host: nn.Module) -> None:
    """Have `generate` of this host tell the call under way which text it is at."""
    inner = inner_host(host)
    if hasattr(inner, "prepare_inputs_for_generation"):
        inner.__dict__["prepare_inputs_for_generation"] = NotingTexts(handle, inner)


def forget_texts(host: nn.Module) -> None:
    """Undo `note_texts`."""
    inner_host(host).__dict__.pop("prepare_inputs_for_generation", None)
