"""What is refused of the columns of entries: ids, texts, metadata and tokens that an index cannot hold."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mmattn.errors import ConfigError, IndexMismatchError, ShapeError, TextError
from mmattn.memory import Memory
from mmattn.retrieval.entries import Entries, Filter, Id
from mmattn.storage.json_files import dump_json

MAX_METADATA = 4 << 30


def as_id_list(ids: Iterable[Id]) -> list[Id]:
    """Ids of entries that are there, as a list.

    Args:
        ids: what was given.

    Raises:
        ConfigError: one id, and no list of them.
    """
    if isinstance(ids, (str, int)):
        raise ConfigError(f"ids must be a list, got {ids!r}; for one entry give [{ids!r}]")
    return list(ids)


def check_known(names: Sequence[Id], known: Collection[Id]) -> None:
    """Refuse ids of entries that are not there.

    Args:
        names: the ids that were given.
        known: those that are there.

    Raises:
        IndexMismatchError: an id that is not known, or one given twice.
    """
    unknown = [name for name in names if not is_id(name) or name not in known]
    if unknown:
        raise IndexMismatchError(
            f"the index has no entry {_listed(unknown)}, of {len(names)} given ids (it has {len(known)} entries, "
            f"{_listed(list(known))}); nothing was changed"
        )
    _refuse_twice(names)


def check_new(names: Sequence[Id], known: Collection[Id]) -> None:
    """Refuse ids of entries that are there already.

    Args:
        names: the ids of new entries.
        known: those of them that are there.

    Raises:
        IndexMismatchError: an id that is known.
    """
    taken = [name for name in names if name in known]
    if taken:
        raise IndexMismatchError(
            f"the index already has an entry {_listed(taken)}, of {len(names)} given ids; to replace entries use "
            "update. Nothing was changed"
        )


def is_id(name: object) -> bool:
    """Whether an object may name an entry: text or an int. True is no 1, and 1.0 neither."""
    return isinstance(name, (str, int)) and not isinstance(name, bool)


def check_ids(ids: Iterable[Any], count: int) -> tuple[Id, ...]:
    """Ids as a tuple: text or ints, one per entry, no two the same.

    Args:
        ids: what was given.
        count: how many entries there are.

    Raises:
        IndexMismatchError: anything else.
    """
    found = tuple(_listable("ids", ids))
    for row, name in enumerate(found):
        if not is_id(name):
            raise IndexMismatchError(f"ids are text or ints, got {name!r:.80} ({type(name).__name__}) at row {row}")
    if len(found) != count:
        raise IndexMismatchError(f"each entry needs one id: got {len(found)} ids for {count} entries")
    _refuse_twice(found)
    return found


def check_texts(texts: Iterable[Any], count: int | None = None, *, optional: bool = False) -> tuple[str | None, ...]:
    """Texts as a tuple, of `count` entries.

    Args:
        texts: the texts.
        count: how many there must be.
        optional: whether None stands for an entry without a text.

    Raises:
        TextError: something else, or another number of them.
    """
    found = tuple(_listable("texts", texts))
    for row, text in enumerate(found):
        if not isinstance(text, str) and not (optional and text is None):
            raise TextError(f"text {row} must be a string, got {text!r:.80} ({type(text).__name__}); leave the row out")
    if count is not None and len(found) != count:
        raise TextError(f"each entry needs one text: got {len(found)} texts for {count} entries")
    return found


def check_metadata(metadata: Iterable[Any], count: int) -> tuple[Any, ...]:
    """Metadata as a tuple of plain JSON values, copied, so that later changes by the caller do not reach the index.

    Args:
        metadata: what was given.
        count: how many entries there are.

    Raises:
        ConfigError: a value JSON cannot hold, or another number of them.
    """
    found = tuple(_listable("metadata", metadata))
    if len(found) != count:
        raise ConfigError(f"each entry needs one value of metadata: got {len(found)} for {count} entries")
    try:
        return tuple(json.loads(dump_json("metadata", found, MAX_METADATA)))
    except ConfigError:
        for row, value in enumerate(found):
            dump_json(f"metadata {row}", value, MAX_METADATA)  # says which
        raise


def check_filter(chosen: Filter | None) -> Filter | None:
    """A filter as every store compares it: a dict of metadata as JSON has it, in which metadata is kept.

    Args:
        chosen: the filter; a function stays as it is.

    Raises:
        ConfigError: a dict of values that JSON does not have.
    """
    if not isinstance(chosen, Mapping):
        return chosen
    try:
        found: dict[str, Any] = json.loads(dump_json("filter", dict(chosen), MAX_METADATA))
    except ConfigError as error:
        raise ConfigError(f"{error}; metadata is JSON, and a filter is compared with it") from error
    return found


def check_tokens(tokens: Any, count: int) -> tuple[Tensor, ...]:
    """The real slots (m, e') of each row of a memory, copied to the CPU.

    Args:
        tokens: the memory.
        count: how many rows it must have.

    Raises:
        ShapeError: no memory, or another number of rows.
    """
    if not isinstance(tokens, Memory):
        raise ShapeError(f"tokens must be a Memory with one row per entry, got {type(tokens).__name__}")
    if tokens.batch != count:
        raise ShapeError(f"tokens must have one row per entry: got {tokens.batch} rows for {count} entries")
    tokens.check_finite()
    mask = tokens.mask
    rows = [tokens.tokens[i] if mask is None else tokens.tokens[i][mask[i]] for i in range(count)]
    return tuple(row.detach().to("cpu", copy=True) for row in rows)


def check_tokens_agree(held: Tensor | None, tokens: Sequence[Tensor] | None) -> None:
    """Refuse encoded tokens where the other entries have none, the other way round, or of another width.

    Args:
        held: the tokens (m, e') of an entry that is there; None where it has none.
        tokens: those of the entries to come; None where none were given.

    Raises:
        ShapeError: they do not agree.
    """
    if (held is None) != (tokens is None):
        raise ShapeError(
            "the index has encoded tokens for its entries: give tokens= with these, too"
            if tokens is None
            else "the index has no encoded tokens for its entries: leave tokens= out, or build it again with all"
        )
    widths = {part.shape[1] for part in (*(() if held is None else (held,)), *(tokens or ()))}
    if len(widths) > 1:
        raise ShapeError(f"encoded tokens of one index have one width, got {sorted(widths)}")


def check_lines(entries: Entries) -> None:
    """Refuse ids and texts that no JSON line can hold (half a surrogate pair, say).

    Args:
        entries: the entries.

    Raises:
        TextError: naming the entry.
    """
    for row, line in enumerate(zip(entries.ids, entries.texts, strict=True)):
        try:
            "".join(str(part) for part in line if part is not None).encode()
        except UnicodeEncodeError as error:
            raise TextError(
                f"entry {row} has half a surrogate pair in its id or text, which no file can hold; read it with the "
                "right encoding, or repair it: text.encode('utf-8', 'replace').decode()"
            ) from error


def _listable(what: str, values: Iterable[Any]) -> Iterable[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ConfigError(f"{what} must be a list with one value per entry, got {type(values).__name__}")
    return values


def _refuse_twice(names: Sequence[Id]) -> None:
    if len(set(names)) != len(names):
        seen: set[Id] = set()
        twice = [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        raise IndexMismatchError(
            f"an id names one entry, and {_listed(twice)} is given more than once; nothing changed"
        )


def _listed(names: Sequence[Id]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
