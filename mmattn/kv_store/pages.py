"""The tables of a bank: tokens, mask and presence of every entry, and a page of keys and values per adapter and layer.

Row 0 of each table is blank and is read for a missing hit; entry r is in row r + 1. Tables never change; an edit makes
new ones. Pages have a floating point dtype or int8 codes with scales. Keys have channels that are large in every slot,
values have none: keys share a scale per channel of an entry, values per slot (arXiv 2402.02750). A scale never reaches
beyond its entry, so that writing one entry changes no other.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike

import torch
from torch import Tensor

from mmattn import __version__
from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.files import Shapes, check_tensors
from mmattn.core.key_values import KeyValue, pack
from mmattn.core.projection import KeyValueProjection
from mmattn.core.tracing import may_read
from mmattn.errors import AdapterFileError, ConditionError, ConfigError, NonFiniteError, ShapeError
from mmattn.hosts.model import AdaptedModel
from mmattn.memory import Memory
from mmattn.storage.json_files import parse_errors, validated
from mmattn.storage.safetensors import DTYPES, NAMES, fingerprint, read_tensors, write_tensors
from mmattn.storage.tensor_cache import TensorVersion, autocast_dtype


def quantize(numbers: Tensor, over: int) -> tuple[Tensor, Tensor]:
    """Return codes int8 of the shape of `numbers`, and their scales bfloat16 with size 1 in dimension `over`."""
    numbers = numbers.float()
    # In bfloat16, as far-reaching as float32; the codes are those of the scale as it is stored.
    scales = (numbers.abs().amax(over, keepdim=True) / 127).clamp(min=2.0**-120).bfloat16()
    return (numbers / scales).round().clamp(-127, 127).to(torch.int8), scales


BANK = "mmattn-bank"
#: Slots projected at a time.
CHUNK = 1 << 14
#: Keys of shorter entries have a scale per slot: one per channel would hold for too few numbers.
CHANNEL_SLOTS = 16

Tables = Mapping[str, Tensor]


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


def weight_versions(model: AdaptedModel, names: Sequence[str], width: int) -> dict[str, TensorVersion]:
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


def check_versions(model: AdaptedModel, versions: Mapping[str, TensorVersion], count: int) -> None:
    """Raise ConditionError if the weights of an adapter have changed since its pages were computed."""
    for name, version in versions.items():
        if not version.holds(weights(model.adapter(name)).values()):
            raise ConditionError(
                f"the weights of adapter {name!r} have changed since the pages of this bank of {count} rows were "
                "computed: compute them again with bank.refresh(), or take bank.memory(rows)"
            )


# Tables --------------------------------------------------------------------------------------------------------------


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise ConfigError for a dtype that pages cannot have; None stands for that of the weights."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype is torch.int8)):
        raise ConfigError(
            f"keys and values are cached in a floating point dtype or in torch.int8, got {dtype!r}: give "
            "dtype=torch.bfloat16 or torch.int8 for fewer bytes"
        )


def page_tables(
    model: AdaptedModel, names: Iterable[str], dtype: torch.dtype | None, tokens: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Return the tables of entries (n, m, e), n > 0, with mask (n, m)."""
    tokens = tokens.masked_fill(~mask[..., None], 0)
    step = max(1, CHUNK // tokens.shape[1])
    pieces = [
        _page_rows(model, names, dtype, Memory(entries, real, check_finite=False))
        for entries, real in zip(tokens.split(step), mask.split(step), strict=True)
    ]
    tables = {name: torch.cat([piece[name].to(tokens.device) for piece in pieces]) for name in pieces[0]}
    return {"tokens": tokens, "mask": mask, "present": torch.ones_like(mask[:, 0]), **tables}


def _page_rows(
    model: AdaptedModel, names: Iterable[str], dtype: torch.dtype | None, memory: Memory
) -> dict[str, Tensor]:
    """Return rows of the tables of adapters for entries: the mask as an adapter reads it, keys and values by layer."""
    pages = {}
    for name in names:
        adapter = model.adapter(name)
        with torch.autocast(adapter.weight.device.type, enabled=False):
            read = adapter.read(memory)
            mask = pages[f"{name}.mask"] = read.real_slots()
            for layer in adapter.layers:
                projection = adapter.kv_projection(layer)
                assert isinstance(projection, KeyValueProjection)
                if projection.rotary is not None:
                    raise ConfigError(
                        "this layer rotates keys by their position in the memory, so they cannot be cached by entry: "
                        "give the memory of each request instead"
                    )
                projected = projection.keys_and_values(projection.cast(read.tokens))
                keys, values = (numbers.transpose(1, 2).contiguous() for numbers in projected)
                if not all(bool(torch.isfinite(numbers).all()) for numbers in (keys, values)):
                    raise NonFiniteError(
                        f"keys or values of an entry overflow in adapter {name!r} "
                        f"({str(read.dtype).removeprefix('torch.')}): scale its vectors, or use a wider dtype"
                    )
                rows = _encoded(dtype, keys, values, mask)
                pages |= {f"{name}.{layer}.{part}": row for part, row in rows.items()}
    return pages


def _encoded(dtype: torch.dtype | None, keys: Tensor, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return rows of the tables for keys and values (n, m, g, k) of entries with mask (n, m)."""
    if dtype is not torch.int8:
        return {"keys": keys.to(dtype or keys.dtype), "values": values.to(dtype or values.dtype)}
    keys, values = (numbers.masked_fill(~mask[..., None, None], 0) for numbers in (keys, values))
    key_codes, key_scales = quantize(keys, 1 if keys.shape[1] >= CHANNEL_SLOTS else 3)
    value_codes, value_scales = quantize(values, 3)
    return {"keys": key_codes, "keys.scales": key_scales, "values": value_codes, "values.scales": value_scales}


def gather_pages(adapter: AdapterLayers, layer: int, tables: Tables, rows: Tensor, scores: Tensor | None) -> KeyValue:
    """Return the keys and values that `project` computes for a memory of entries (b, n), from their pages."""
    projection = adapter.kv_projection(layer)
    assert isinstance(projection, KeyValueProjection)
    weight = projection.k_proj.weight
    device, dtype = weight.device, weight.dtype
    if dtype is not torch.float64:
        dtype = autocast_dtype(device) or dtype
    mask = tables[f"{adapter.name}.mask"][rows].flatten(1).to(device)
    counts = tuple(mask.sum(1).tolist()) if may_read(mask) else None
    visible = None if counts is not None and sum(counts) == mask.numel() else mask
    bias = None if scores is None else projection.score_bias(scores.to(device), visible)
    lengths = counts if projection.packs(counts, mask.shape[1]) else None

    def part(name: str) -> Tensor:
        """Return numbers (b, g, n·m, k), or of the real slots of all rows (1, g, r, k)."""
        table, scales = tables[f"{adapter.name}.{layer}.{name}"], tables.get(f"{adapter.name}.{layer}.{name}.scales")
        numbers = table[rows].to(device, dtype)
        if scales is not None:
            numbers = (numbers * scales[rows].to(device)).to(dtype)
        numbers = numbers.flatten(1, 2)
        return (numbers if lengths is None else pack(numbers, mask, lengths, first=False)).transpose(1, 2)

    if lengths is not None and bias is not None:
        bias = pack(bias, mask, lengths, first=False)
    return projection.join(part("keys"), part("values"), visible, bias, lengths)


# Files ---------------------------------------------------------------------------------------------------------------


def write_bank(
    path: str | PathLike[str],
    model: AdaptedModel,
    names: Iterable[str],
    dtype: torch.dtype | None,
    tables: Tables,
) -> None:
    """Write the tables of a bank, the dtype of its pages, and the digests of its adapters."""
    prints = {name: _digest(model.adapter(name)) for name in names}
    about = {"adapters": prints, "dtype": None if dtype is None else NAMES[dtype]}
    write_tensors(path, tables, {"format": BANK, "mmattn_version": __version__, **about})


def _digest(adapter: AdapterLayers) -> str:
    """Return a sha256 of the settings of an adapter and of the weights that pages depend on."""
    return hashlib.sha256(f"{adapter.config!r} {fingerprint(weights(adapter))}".encode()).hexdigest()


def read_bank(
    path: str | PathLike[str], model: AdaptedModel, mapped: bool
) -> tuple[list[str], torch.dtype | None, dict[str, Tensor]]:
    """Return the names of the adapters of a bank, the dtype of its pages, and its tables.

    Raises AdapterFileError if the file is truncated, modified or of another kind, or the pages are of another adapter.
    """
    with parse_errors(path, "bank"):
        tables, metadata = read_tensors(path, BANK, mapped=mapped)
        names = _check_adapters(path, model, validated("adapters", dict[str, str], metadata.get("adapters")))
        dtype = metadata["dtype"] if metadata["dtype"] is None else DTYPES[metadata["dtype"]]
        check_dtype(dtype)
        _check_bank(model, names, dtype, {name: (tuple(table.shape), table.dtype) for name, table in tables.items()})
        if bool(tables["mask"][0].any()) or bool(tables["present"][0]):
            raise AdapterFileError(f"{str(path)!r} has an entry in the first row, which a bank leaves empty")
    return names, dtype, tables


def _check_adapters(path: str | PathLike[str], model: AdaptedModel, prints: Mapping[str, str]) -> list[str]:
    """Return the names of the adapters in a file, checked against those of this host."""
    if not prints:
        raise AdapterFileError(f"cannot read {str(path)!r}: it does not name the adapters of its pages")
    for name, expected in prints.items():
        if name not in model.adapters:
            raise AdapterFileError(
                f"the bank in {str(path)!r} has pages of an adapter {name[:100]!r}, and this host has "
                f"{', '.join(map(repr, model.adapters))}: attach that adapter under this name, or build the bank again "
                "with model.bank(memory)"
            )
        if _digest(model.adapter(name)) != expected:
            raise AdapterFileError(
                f"the pages in {str(path)!r} were computed with other weights or settings than adapter {name!r} has "
                "here: load that adapter, or build the bank again with model.bank(memory)"
            )
    return list(prints)


def _check_bank(model: AdaptedModel, names: Iterable[str], dtype: torch.dtype | None, shapes: Shapes) -> None:
    """Compare the tables of a file with those of a bank for these adapters."""
    shape, kind = shapes.get("tokens", ((), torch.bool))
    if len(shape) != 3 or not all(shape) or not kind.is_floating_point:
        raise AdapterFileError(f"a bank has tokens (n + 1, m, e) in floating point, and the file {kind} {list(shape)}")
    for name in names:
        width = model.adapter(name).config.memory_dim
        if width != shape[2]:
            raise AdapterFileError(
                f"adapter {name!r} reads entries of width {width}, and the file's are {shape[2]} wide"
            )
    with without_graph():
        blank = page_tables(model, names, dtype, torch.zeros(1, *shape[1:], dtype=kind), torch.zeros(1, shape[1]) > 0)
    check_tensors({name: ((shape[0], *table.shape[1:]), table.dtype) for name, table in blank.items()}, shapes)
