"""The tables of a bank: which entries fit into them, their pages by adapter, and the state of the weights of these."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.base import AdapterLayers
from mmattn.core.attention import all_finite
from mmattn.core.tensor_cache import TensorVersion
from mmattn.errors import ConditionError, NonFiniteError, ShapeError
from mmattn.kv_store.page_formats import PageFormat
from mmattn.kv_store.pages import make_pages, projection_of
from mmattn.memory import Memory

# Slots projected at a time.
CHUNK = 1 << 14


def weight_versions(model: Any, names: Sequence[str], width: int) -> dict[str, TensorVersion]:
    """The state of the weights that compute the pages of these adapters.

    Args:
        model: the adapted model.
        names: of the adapters.
        width: e of the entries.

    Raises:
        ConditionError: no adapter, or one whose keys and values the host's own attention reads.
        ShapeError: one that reads entries of another width.
    """
    if not names:
        raise ConditionError(
            "a bank caches keys and values of the active adapters, and none is active: set_adapter(name) first"
        )
    for name in names:
        if model.adapter(name).position == "joined":
            raise ConditionError(
                f"adapter {name!r} (kind {model.adapter(name).config.kind!r}) joins slots with the host's own keys and "
                "values, which a bank has no pages of: make it inactive with set_adapter, or give the memory itself"
            )
        wanted = model.adapter(name).config.memory_dim
        if wanted != width:
            raise ShapeError(
                f"adapter {name!r} has memory_dim={wanted}, and the entries are of width {width}: use the "
                "encoder it was trained with, or make it inactive with set_adapter"
            )
    return {name: TensorVersion(weights(model.adapter(name)).values()) for name in names}


def check_versions(model: Any, versions: Mapping[str, TensorVersion], count: int) -> None:
    """Refuse to use pages that were computed with other weights.

    Args:
        model: the adapted model.
        versions: as `weight_versions` gave them when the pages were computed.
        count: rows of the bank, for the message.

    Raises:
        ConditionError: the weights of an adapter have changed.
    """
    for name, version in versions.items():
        if not version.holds(weights(model.adapter(name)).values()):
            raise ConditionError(
                f"the weights of adapter {name!r} have changed since the pages of this bank of {count} rows were "
                "computed: bank.refresh() computes them again, bank.memory(rows) gives the entries without them"
            )


def weights(adapter: AdapterLayers) -> dict[str, Tensor]:
    """All weights that keys and values of entries are computed with, by a name within the adapter."""
    named: dict[str, Tensor] = {f"read.{i}": weight for i, weight in enumerate(adapter.reading_parameters())}
    for layer in adapter.layers:
        own = adapter.attention(layer).projecting_parameters()
        named |= {f"{layer}.{i}": weight for i, weight in enumerate(own)}
    return named


def check_entries(memory: Memory | Tensor, like: Tensor | None = None) -> Memory:
    """The entries of a bank as a memory, refused where keys and values cannot be cached entry by entry.

    Args:
        memory: (n, m, e), a row for each entry.
        like: (·, m, e), the entries that are there already.

    Raises:
        ShapeError: no slots, other sizes than `like`, or scores or segments, which belong to a request.
        ConditionError: tokens that need gradients.
        NonFiniteError: NaN or infinity in a slot that may be attended to.
    """
    memory = Memory(memory, check_finite=False) if isinstance(memory, Tensor) else memory
    if not isinstance(memory, Memory):
        raise ShapeError(f"a bank takes a Memory or a tensor (n, m, e), a row for each entry; got {type(memory)}")
    if not memory.length:
        raise ShapeError(f"an entry of a bank needs at least one slot, got {tuple(memory.tokens.shape)}")
    if memory.scores is not None or memory.segments is not None:
        raise ShapeError("entries of a bank have no scores and no segments: a request gives scores, one for each hit")
    if memory.tokens.requires_grad:
        raise ConditionError("the entries need gradients, and keys and values in a bank have none: detach() them first")
    memory.check_finite()
    if like is not None and memory.tokens.shape[1:] != like.shape[1:]:
        raise ShapeError(
            f"the entries of this bank are (n, {like.shape[1]}, {like.shape[2]}), got "
            f"{tuple(memory.tokens.shape)}: pad shorter ones and mask the rest"
        )
    return memory


@contextlib.contextmanager
def without_graph() -> Iterator[None]:
    """Inside the block tensors are computed without a graph, and can be used outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def page_rows(model: Any, names: Iterable[str], form: PageFormat, memory: Memory) -> dict[str, Tensor]:
    """Rows of the tables of adapters for some entries: the mask of what they read, keys and values by layer.

    Args:
        model: the adapted model.
        names: of the adapters.
        form: of the pages.
        memory: (n, m, e), the entries.

    Raises:
        ConfigError: keys depend on their position in the memory.
        NonFiniteError: keys or values of an entry overflow.
    """
    pages = {}
    for name in names:
        adapter = model.adapter(name)
        with torch.autocast(adapter.weight.device.type, enabled=False):
            read = adapter.read(memory)
            mask = pages[f"{name}.mask"] = read.real_slots()
            for layer in adapter.layers:
                made = make_pages(projection_of(adapter.attention(layer)), read.tokens)
                if not all_finite(*made) and not all(bool(torch.isfinite(one).all()) for one in made):
                    raise NonFiniteError(
                        f"keys or values of an entry overflow in adapter {name!r} "
                        f"({str(read.dtype).removeprefix('torch.')}): scale its vectors, or use a wider dtype"
                    )
                pages |= {f"{name}.{layer}.{part}": row for part, row in form.encode(*made, mask).items()}
    return pages


@without_graph()
def blank_tables(model: Any, names: Iterable[str], form: PageFormat, tokens: Tensor, rows: int) -> dict[str, Tensor]:
    """Tables of zeros.

    Args:
        model: the adapted model.
        names: of the adapters that have pages.
        form: of the pages.
        tokens: (·, m, e), entries whose sizes, dtype and device the tables have.
        rows: of each table.
    """
    entry = tokens.new_zeros(1, *tokens.shape[1:])
    mask = torch.ones(entry.shape[:2], dtype=torch.bool, device=tokens.device)
    like = {"tokens": entry, "mask": mask, "edition": torch.zeros(1, dtype=torch.long)}
    like |= page_rows(model, names, form, Memory(entry, mask, check_finite=False))
    return {
        name: torch.zeros((rows, *row.shape[1:]), dtype=row.dtype, device=tokens.device) for name, row in like.items()
    }


def write_entries(
    tables: dict[str, Tensor], begin: int, memory: Memory, model: Any, names: Iterable[str], form: PageFormat
) -> None:
    """Write entries and their pages to tables; their editions stay as they are.

    Args:
        tables: by name.
        begin: the first row to write.
        memory: (n, m, e), the entries.
        model: the adapted model.
        names: of the adapters that have pages.
        form: of the pages.
    """
    tokens, mask = memory.tokens, memory.real_slots()
    end = begin + len(tokens)
    tables["tokens"][begin:end] = tokens
    tables["tokens"][begin:end].masked_fill_(~mask.to(tables["mask"].device)[..., None], 0)
    tables["mask"][begin:end] = mask
    write_pages(tables, begin, tables["tokens"][begin:end], tables["mask"][begin:end], model, names, form)


def write_pages(
    tables: dict[str, Tensor],
    begin: int,
    tokens: Tensor,
    mask: Tensor,
    model: Any,
    names: Iterable[str],
    form: PageFormat,
) -> None:
    """Write the pages of entries to tables.

    Args:
        tables: by name.
        begin: the first row to write.
        tokens: (n, m, e), the entries.
        mask: (n, m) bool, their padding.
        model: the adapted model.
        names: of the adapters that have pages.
        form: of the pages.
    """
    step = max(1, CHUNK // tokens.shape[1])
    for i in range(0, len(tokens), step):
        piece = Memory(tokens[i : i + step], mask[i : i + step], check_finite=False)
        for name, pages in page_rows(model, names, form, piece).items():
            tables[name][begin + i : begin + i + len(pages)] = pages


def grown(table: Tensor, rows: int) -> Tensor:
    """A copy of a table with blank rows appended, `rows` in all."""
    larger = table.new_zeros(rows, *table.shape[1:])
    larger[: len(table)] = table
    return larger
