"""Which texts the rows of a forward hold from their first token on: one a row, or the documents of packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.cache_argument import given_cache
from mmattn.adapters.packed_text import BOUNDARIES, PackedText, packed_text
from mmattn.errors import ConditionError
from mmattn.hosts.causal_lm.generation import inputs_of
from mmattn.hosts.context import step_of

_BOUNDARIES = (*BOUNDARIES, "seq_idx", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: What a text may be given with, and what says nothing of it.
_KNOWN = {"input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", *_BOUNDARIES}
_KNOWN |= {
    "labels",
    "shift_labels",
    "ignore_index",
    "num_items_in_batch",
    "return_loss",
    "logits_to_keep",
    "return_dict",
}
_RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class TextsRead:
    """The texts of a forward.

    Args:
        ids: (l,) of each.
        places: (t,) of their tokens in the flattened rows, one text after the other.
        shape: b and l of the rows.
    """

    ids: list[Tensor]
    places: Tensor
    shape: tuple[int, int]

    def in_rows(self, states: list[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Hidden states (b, l, d) with those of each text (l, d) at its place, and 0 on the padding.

        Args:
            states: of each text.
            device: of the result.
            dtype: of the result.
        """
        flat = torch.zeros(self.shape[0] * self.shape[1], states[0].shape[1], device=device, dtype=dtype)
        flat[self.places.to(device)] = torch.cat([one.to(device, non_blocking=True) for one in states]).to(dtype)
        return flat.view(*self.shape, -1)


def texts_read(model: Any, config: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TextsRead | None:
    """The texts of one forward; None where it continues or writes one, or reads packed rows without a memory.

    Args:
        model: the adapted model.
        config: of the part of its host that is called.
        args: it is called with.
        kwargs: it is called with, by name.

    Raises:
        ConditionError: the texts are not given as ids from their first token on, or with something that hidden states
            may depend on, besides.
    """
    step = step_of(model)
    text = None if step is None else step.details
    if given_cache(kwargs) is not None or kwargs.get("use_cache"):
        return None
    if text is not None and text.prompt is not None:
        return None
    ids = inputs_of(args, kwargs)
    if ids is None or ids.is_floating_point() or len(args) > 1:
        raise _refused("the host was given embeddings, or arguments without their names: give it input_ids=")
    asked = [name for name in _RECORDED if kwargs.get(name, getattr(config, name, False))]
    asked += [name for name, value in kwargs.items() if name not in (*_KNOWN, *_RECORDED) and _is_given(value)]
    if asked:
        raise _refused(
            f"the host was called with {asked[0]}, on which these may depend or which they are a part of: leave it out"
        )
    packed = packed_text(kwargs, *ids.shape) if text is None else text.packed
    if packed is None:
        packed = _rows(kwargs.get("attention_mask"), ids)
    elif text is None:
        return None  # nobody has seen to it that the host keeps the documents apart
    if packed is None:
        return None
    _check_begun(packed, kwargs.get("position_ids"), ids)
    documents = packed.unpack(ids)
    return TextsRead(
        [row[own] for row, own in zip(documents, packed.real, strict=True)], packed.tokens, (ids.shape[0], ids.shape[1])
    )


def _rows(mask: Any, ids: Tensor) -> PackedText | None:
    """The text of each row; None where all is padding."""
    if mask is None:
        real = torch.ones_like(ids, dtype=torch.bool)
    elif mask.dim() == 2 and mask.shape == ids.shape:
        real = mask.bool().to(ids.device)
    else:
        raise _refused(f"attention_mask is {tuple(mask.shape)} and does not say which tokens are padding")
    if not bool(real.any()):
        return None
    rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    return PackedText.of(rows.masked_fill(~real, -1))


def _check_begun(packed: PackedText, positions: Tensor | None, ids: Tensor) -> None:
    """Refuse texts that do not begin at position 0, or are not in one piece."""
    length = ids.shape[1]
    place = packed.places % length
    count = torch.arange(packed.longest, device=place.device)
    at = place if positions is None else packed.unpack(positions.expand_as(ids))
    whole = (at == count) & (place - place[:, :1] == count)
    if not bool((whole | ~packed.real).all()):
        raise _refused(
            "a text does not stand at positions 0, 1, 2, …: pad on the right, or give position_ids=(b, l) that begin "
            "with 0 at the first token of each text"
        )


def _is_given(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _refused(why: str) -> ConditionError:
    return ConditionError(f"hidden states of the lower layers are cached by the ids of a text, and {why}")
