"""The tables of a bank: tokens, mask and presence of every entry, and a page of keys and values per adapter and layer.

Row 0 of each table is blank and is read for a missing hit; entry r is in row r + 1. Pages have a floating point dtype
or int8 codes with scales. Keys have channels that are large in every slot, values have none: keys share a scale per
channel of an entry, values per slot (arXiv 2402.02750). A scale never reaches beyond its entry, so that writing one
entry changes no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.core.key_value_projection import KeyValueProjection
from mmattn.core.kv_cache import KeyValue, pack
from mmattn.core.quantization import quantize
from mmattn.core.tensor_cache import TensorVersion
from mmattn.core.tracing import all_finite, may_read
from mmattn.errors import ConditionError, ConfigError, NonFiniteError, ShapeError
from mmattn.memory import Memory

#: Slots projected at a time.
CHUNK = 1 << 14
#: Keys of shorter entries have a scale per slot: one per channel would hold for too few numbers.
CHANNEL_SLOTS = 16


class Model(Protocol):
    """An adapted model, as a bank uses it."""

    @property
    def active(self) -> Sequence[str]:
        """Names of the active adapters."""

    @property
    def adapters(self) -> nn.ModuleDict:
        """All adapters by name."""

    def adapter(self, name: str) -> AdapterLayers:
        """Return an adapter by its name."""

    def check_attached(self) -> None:
        """Raise ConditionError after `unload`."""


@contextlib.contextmanager
def without_graph() -> Iterator[None]:
    """Compute tensors without a graph that can be used outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


# The weights that pages depend on --------------------------------------------------------------------------------


def weights(adapter: AdapterLayers) -> dict[str, Tensor]:
    """Return all weights that keys and values of entries are computed with."""
    named: dict[str, Tensor] = {f"read.{i}": weight for i, weight in enumerate(adapter.reading_parameters())}
    for layer in adapter.layers:
        parameters = adapter.kv_projection(layer).projecting_parameters()
        named |= {f"{layer}.{i}": weight for i, weight in enumerate(parameters)}
    return named


def weight_versions(model: Model, names: Sequence[str], width: int) -> dict[str, TensorVersion]:
    """Return the state of the weights of each adapter; refuse adapters without pages or of another width."""
    if not names:
        raise ConditionError(
            "a bank caches keys and values of the active adapters, and none is active: set_adapter(name) first"
        )
    for name in names:
        adapter = model.adapter(name)
        if adapter.position == "joined":
            raise ConditionError(
                f"adapter {name!r} (kind {adapter.config.kind!r}) joins slots with the host's keys and values: a bank "
                "has no pages of them. Make it inactive with set_adapter, or give the memory itself"
            )
        if adapter.config.memory_dim != width:
            raise ShapeError(
                f"adapter {name!r} has memory_dim={adapter.config.memory_dim}, and the entries are of width {width}: "
                "use the encoder it was trained with, or make it inactive with set_adapter"
            )
    return {name: TensorVersion(weights(model.adapter(name)).values()) for name in names}


def check_versions(model: Model, versions: Mapping[str, TensorVersion], count: int) -> None:
    """Raise ConditionError if the weights of an adapter have changed since its pages were computed."""
    for name, version in versions.items():
        if not version.holds(weights(model.adapter(name)).values()):
            raise ConditionError(
                f"the weights of adapter {name!r} have changed since the pages of this bank of {count} rows were "
                "computed: compute them again with bank.refresh(), or take bank.memory(rows)"
            )


# The form of pages -----------------------------------------------------------------------------------------------


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise ConfigError for a dtype that pages cannot have; None stands for that of the weights."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype is torch.int8)):
        raise ConfigError(
            f"keys and values are cached in a floating point dtype or in torch.int8, got {dtype!r}: give "
            "dtype=torch.bfloat16 or torch.int8 for fewer bytes"
        )


def page_parts(dtype: torch.dtype | None) -> tuple[str, ...]:
    """Return the names of the tables of a layer."""
    return ("codes", "key_scales", "value_scales") if dtype is torch.int8 else ("keys", "values")


def encode_pages(dtype: torch.dtype | None, keys: Tensor, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return rows of the tables for keys and values (n, g, m, k) of entries with mask (n, m)."""
    if dtype is not torch.int8:
        return {"keys": keys.to(dtype or keys.dtype), "values": values.to(dtype or values.dtype)}
    keys, values = (numbers.masked_fill(~mask[:, None, :, None], 0) for numbers in (keys, values))
    key_codes, key_scales = quantize(keys, 2 if keys.shape[2] >= CHANNEL_SLOTS else 3)
    value_codes, value_scales = quantize(values, 3)
    return {"codes": torch.cat([key_codes, value_codes], 1), "key_scales": key_scales, "value_scales": value_scales}


def decode_pages(
    tables: Mapping[str, Tensor], rows: Tensor, real: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values of entries (b, n), laid out by `_side_by_side`; `real` (b, n·m) packs them."""
    if "keys" in tables:
        keys, values = (_side_by_side(tables[part], rows, real).to(device, dtype) for part in ("keys", "values"))
        return keys, values
    codes, slots = _side_by_side(tables["codes"], rows, real), tables["codes"].shape[2]
    keys, values = codes.to(device, dtype).chunk(2, 1)
    _multiply(keys, tables["key_scales"], rows, real, slots)
    _multiply(values, tables["value_scales"], rows, real, slots)
    return keys, values


def _multiply(codes: Tensor, scales: Tensor, rows: Tensor, real: Tensor | None, slots: int) -> None:
    """Multiply codes in place with scales (·, g, m, 1) by slot or (·, g, 1, k) by channel."""
    if scales.shape[2] == slots:
        codes.mul_(_side_by_side(scales, rows, real).to(codes.device))
    elif real is None:
        by_entry = _side_by_side(scales, rows, None).to(codes.device)
        codes.unflatten(2, (rows.shape[1], slots)).mul_(by_entry.unsqueeze(3))
    else:
        row, slot = real.to(rows.device).nonzero().unbind(1)
        codes.mul_(_side_by_side(scales, rows[row, slot // slots][None], None).to(codes.device))


# Writing and reading tables --------------------------------------------------------------------------------------


@without_graph()
def blank_tables(
    model: Model, names: Iterable[str], dtype: torch.dtype | None, tokens: Tensor, rows: int
) -> dict[str, Tensor]:
    """Return tables of zeros for entries like `tokens` (·, m, e)."""
    entry = tokens.new_zeros(1, *tokens.shape[1:])
    mask = torch.ones(entry.shape[:2], dtype=torch.bool, device=tokens.device)
    like = {"tokens": entry, "mask": mask, "present": torch.zeros(1, dtype=torch.bool)}
    like |= _page_rows(model, names, dtype, Memory(entry, mask, check_finite=False))
    return {
        name: torch.zeros((rows, *row.shape[1:]), dtype=row.dtype, device=tokens.device) for name, row in like.items()
    }


def write_rows(
    tables: dict[str, Tensor], begin: int, memory: Memory, model: Model, names: Iterable[str], dtype: torch.dtype | None
) -> None:
    """Write entries (n, m, e) and their pages to tables, from row `begin` on; their presence stays as it is."""
    mask = memory.real_slots().to(tables["mask"].device)
    rows = slice(begin, begin + len(mask))
    tables["tokens"][rows] = memory.tokens
    tables["tokens"][rows].masked_fill_(~mask[..., None], 0)
    tables["mask"][rows] = mask
    step = max(1, CHUNK // memory.length)
    for start in range(rows.start, rows.stop, step):
        piece = slice(start, min(start + step, rows.stop))
        entries = Memory(tables["tokens"][piece], tables["mask"][piece], check_finite=False)
        for name, pages in _page_rows(model, names, dtype, entries).items():
            tables[name][piece] = pages


def _page_rows(model: Model, names: Iterable[str], dtype: torch.dtype | None, memory: Memory) -> dict[str, Tensor]:
    """Return rows of the tables of adapters for entries: the mask as an adapter reads it, keys and values by layer."""
    pages = {}
    for name in names:
        adapter = model.adapter(name)
        with torch.autocast(adapter.weight.device.type, enabled=False):
            read = adapter.read(memory)
            mask = pages[f"{name}.mask"] = read.real_slots()
            for layer in adapter.layers:
                computed = _project(_projection(adapter, layer), read.tokens)
                if not all_finite(*computed) and not all(bool(torch.isfinite(one).all()) for one in computed):
                    raise NonFiniteError(
                        f"keys or values of an entry overflow in adapter {name!r} "
                        f"({str(read.dtype).removeprefix('torch.')}): scale its vectors, or use a wider dtype"
                    )
                pages |= {f"{name}.{layer}.{part}": row for part, row in encode_pages(dtype, *computed, mask).items()}
    return pages


def _projection(adapter: AdapterLayers, layer: int) -> KeyValueProjection:
    projection: KeyValueProjection = adapter.kv_projection(layer)
    return projection


def _project(projection: KeyValueProjection, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (n, g, m, k) of n entries, without a null slot."""
    if projection.rotary is not None:
        raise ConfigError(
            "this layer rotates keys by their position in the memory, which differs between requests, so they are not "
            "cached by entry: give the memory of each request instead"
        )
    keys, values = projection.keys_and_values(projection.cast(tokens))
    return keys.contiguous(), values.contiguous()


def gather_pages(
    adapter: AdapterLayers, layer: int, tables: Mapping[str, Tensor], rows: Tensor, scores: Tensor | None
) -> KeyValue:
    """Return the keys and values that `project` computes for a memory of entries (b, n), from their pages."""
    projection = _projection(adapter, layer)
    weight = projection.k_proj.weight
    dtype = weight.dtype
    if torch.is_autocast_enabled(weight.device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(weight.device.type)
    mask = tables[f"{adapter.name}.mask"][rows].flatten(1).to(weight.device)
    scores = None if scores is None else scores.to(weight.device)
    visible = None if may_read(mask) and bool(mask.all()) else mask
    bias = projection.score_bias(scores, visible)
    lengths = projection.packed_lengths(visible)
    if lengths is not None and bias is not None:
        bias = pack(bias, mask, lengths, first=False)
    prefix = f"{adapter.name}.{layer}."
    pages = {name.removeprefix(prefix): table for name, table in tables.items() if name.startswith(prefix)}
    keys, values = decode_pages(pages, rows, None if lengths is None else mask, weight.device, dtype)
    joined: KeyValue = projection.join(keys, values, visible, bias, lengths)
    return joined


def _side_by_side(table: Tensor, rows: Tensor, real: Tensor | None) -> Tensor:
    """Put pages (b, n) of a table (·, g, m, k) side by side: (b, g, n·m, k), or packed (1, g, r, k) by `real` slots."""
    (b, n), (_, g, m, k) = rows.shape, table.shape
    heads = torch.arange(g, device=table.device)[:, None]
    # One copy, straight into the layout that is read: pages lie in the table head by head.
    if real is None:
        pieces = rows[:, None] * g + heads
        return table.view(-1, m * k).index_select(0, pieces.flatten()).view(b, g, n * m, k)
    row, slot = real.to(table.device).nonzero().unbind(1)
    pieces = (rows[row, slot // m] * g + heads) * m + slot % m
    return table.view(-1, k).index_select(0, pieces.flatten()).view(1, g, len(row), k)
