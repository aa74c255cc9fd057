"""Packed rows on a host: its own attention must keep documents apart, or memories would pass from one to the next."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import call_by_name, device_of, dtype_of, embeddings_of, given_cache, text_config
from mmattn.adapters.text_state import BOUNDARIES, PackedText, TextState
from mmattn.errors import ConditionError
from mmattn.hosts.context import Arguments, Call, Keywords
from mmattn.hosts.probe import bare_forward

#: Cache by host: (attention implementation, document arguments) → how this host separates packed documents.
_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[str | None, ...], str | None]] = WeakKeyDictionary()


def packed_state(call: Call, packed: PackedText, inputs: Tensor, cache: object, kwargs: Keywords) -> TextState:
    """Return the text of a packed forward, whose rows are its documents."""
    return TextState(
        rows=packed.documents,
        length=packed.longest,
        inputs=packed.unpack(inputs),
        past=0,
        cache=cache,
        attention_mask=packed.real.to(inputs.device),
        images=None if call.images is None else packed.unpack(call.images),
        arrivals=call.arrivals and replace(call.arrivals, count=packed.unpack(call.arrivals.count)),
        packed=packed,
        positions=kwargs.get("position_ids"),
    )


def keep_apart(host: nn.Module, kwargs: Keywords, text: PackedText) -> Arguments:
    """Return the arguments of a packed call with which the host keeps documents apart.

    transformers does so by itself where positions start again and neither a mask nor a cache is given. What does not
    (ALiBi, for one) may read a mask of four dimensions. Which it is, a call of seven tokens proves once for each host.
    """
    mask = kwargs.get("attention_mask")
    if kwargs.get("use_cache") or given_cache(kwargs) is not None:
        raise ConditionError(
            "positions start again inside a row: rows of several documents cannot go on with a cache; leave "
            "use_cache out, or give each document a row"
        )
    if isinstance(mask, Tensor) and (mask.dim() != 2 or not bool(mask.all())):
        raise ConditionError(
            "positions start again inside a row, and with an attention_mask transformers mixes the documents: leave it "
            "out (padding may be a document)"
        )
    changed = {name: value for name, value in kwargs.items() if name != "attention_mask"} | {"use_cache": False}
    names = tuple(name for name in (*BOUNDARIES, "seq_idx", "position_ids") if kwargs.get(name) is not None)
    ways, key = _KNOWN.setdefault(host, {}), (getattr(text_config(host), "_attn_implementation", None), *names)
    if key not in ways:
        ways[key] = next((way for way in ("itself", "mask") if _is_apart(host, names, way)), None)
    if ways[key] is None:
        raise ConditionError(
            f"{type(host).__name__} mixes the documents of packed rows, and so their memories: give each document a "
            "row of its own (pad instead of packing)"
        )
    return changed | _mask(text, host) if ways[key] == "mask" else changed


def _mask(text: PackedText, host: nn.Module) -> dict[str, Tensor]:
    """Return the additive mask (b, 1, l, l): 0 within a document, else the smallest number."""
    dtype, number = dtype_of(host), text.numbers.to(device_of(embeddings_of(host)))
    visible = (number[:, :, None] == number[:, None, :]).tril()
    least = torch.finfo(dtype).min
    return {"attention_mask": torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, least)[:, None]}


@torch.no_grad()
def _is_apart(host: nn.Module, said: tuple[str, ...], way: str) -> bool:
    """Return True if a packed document has the output that it has alone."""
    device = device_of(embeddings_of(host))
    size = getattr(text_config(host), "vocab_size", 2)
    ids = (torch.arange(7, device=device) * 7 + 5)[None] % size
    ends = torch.tensor([0, 3, 7], device=device, dtype=torch.int32)
    number = torch.tensor([[0, 0, 0, 1, 1, 1, 1]], device=device)
    offered = {
        "cu_seq_lens_q": ends,
        "cu_seqlens": ends,
        "seq_idx": number.int(),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=device),
        "cu_seq_lens_k": ends,
        "max_length_q": 4,
        "max_length_k": 4,
    }
    names = [*said, *(("cu_seq_lens_k", "max_length_q", "max_length_k") if "cu_seq_lens_q" in said else ())]
    inputs = {name: offered[name] for name in names}
    if way == "mask":
        inputs |= _mask(PackedText.of(number), host)
    try:
        with bare_forward(host):
            packed = call_by_name(host, input_ids=ids, use_cache=False, **inputs).logits[0, 3:]
            alone = call_by_name(host, input_ids=ids[:, 3:], use_cache=False).logits[0]
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False  # it cannot be called so
    return bool((packed - alone).abs().max() <= 0.02 * alone.abs().max())
