"""The tables of a bank: what entries may be kept, what the adapters make of them, and whether they still would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.adapter_layers import AdapterLayers
from mmattn.core.tensor_cache import TensorVersion
from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.bank.pages import make_pages, projection_of
from mmattn.memory import Memory


def makers_of(model: Any, names: Sequence[str], width: int) -> dict[str, TensorVersion]:
    """The weights of these adapters as they are now, to make pages of entries of this width.

    Raises:
        ConditionError: there is none. ShapeError: one that reads another width.
    """
    if not names:
        raise ConditionError(
            "a bank keeps keys and values of the active adapters, and none is: set_adapter(name) first"
        )
    for name in names:
        wanted = model.adapter(name).config.memory_dim
        if wanted != width:
            raise ShapeError(
                f"adapter {name!r} was made for memory_dim={wanted}, and the entries are of width {width}: use the "
                "encoder it was trained with, or make it inactive with set_adapter"
            )
    return {name: TensorVersion(weights(model.adapter(name)).values()) for name in names}


def weights(adapter: AdapterLayers) -> dict[str, Tensor]:
    """All weights that keys and values are made with."""
    found: dict[str, Tensor] = {f"read.{i}": weight for i, weight in enumerate(adapter.reading_parameters())}
    for layer in adapter.layers:
        own = adapter.attention(layer).projecting_parameters()
        found |= {f"{layer}.{i}": weight for i, weight in enumerate(own)}
    return found


def is_int(tensor: Tensor) -> bool:
    """Whether a tensor holds whole numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_entries(memory: Memory | Tensor) -> Memory:
    """Refuse what cannot be kept entry by entry.

    Raises:
        ShapeError: no slots, or what only a request knows. ConditionError: tokens that are being trained.
            NonFiniteError: NaN or infinity in a slot that may be looked at.
    """
    memory = Memory(memory, check_finite=False) if isinstance(memory, Tensor) else memory
    if not isinstance(memory, Memory):
        raise ShapeError(f"a bank takes a Memory or a tensor (n, m, e), a row for each entry; got {type(memory)}")
    if not memory.length:
        raise ShapeError(f"an entry of a bank needs at least one slot, got {tuple(memory.tokens.shape)}")
    if memory.scores is not None or memory.segments is not None:
        raise ShapeError("entries of a bank have no scores and no segments: a request gives scores, one for each hit")
    if memory.tokens.requires_grad:
        raise ConditionError("the entries need gradients and a bank keeps what was made of them: detach() them first")
    memory.check_finite()
    return memory


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """What is made inside serves calls outside inference mode, too, and no graph holds it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def page_rows(model: Any, names: Iterable[str], memory: Memory) -> dict[str, Tensor]:
    """What the adapters make of entries: the mask of what they read, and keys and values for each layer."""
    made = {}
    for name in names:
        adapter = model.adapter(name)
        with torch.autocast(adapter.weight.device.type, enabled=False):
            read = adapter.read(memory)
            made[f"{name}.mask"] = read._filled("mask")
            for layer in adapter.layers:
                pages = make_pages(projection_of(adapter.attention(layer)), read.tokens)
                made[f"{name}.{layer}.keys"], made[f"{name}.{layer}.values"] = pages
    return made


@keeping()
def blank_tables(
    model: Any, names: Iterable[str], tokens: Tensor, rows: int, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Tables of zeros for entries like tokens (·, m, e), with their keys and values in `dtype`."""
    entry = tokens.new_zeros(1, *tokens.shape[1:])
    mask = torch.ones(entry.shape[:2], dtype=torch.bool, device=tokens.device)
    like = {"tokens": entry, "mask": mask, "edition": torch.zeros(1, dtype=torch.long)}
    like |= page_rows(model, names, Memory(entry, mask, check_finite=False))
    tables = {}
    for name, row in like.items():
        kept = dtype if dtype is not None and name.endswith((".keys", ".values")) else row.dtype
        tables[name] = torch.zeros((rows, *row.shape[1:]), dtype=kept, device=tokens.device)
    return tables


def grown(table: Tensor, rows: int) -> Tensor:
    """A table with room for more rows, blank so far."""
    made = table.new_zeros(rows, *table.shape[1:])
    made[: len(table)] = table
    return made
