"""Ids and metadata as digests, which a database can compare where its own comparison is not that of Python.

Databases round large ints, tell 1 from 1.0, or take a list for each of its values; the digest of a value is equal
exactly where the value is. What a collection or table holds is found by these: they are the same for ever.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

from mmattn.errors import ConfigError
from mmattn.retrieval.entry_checks import MAX_METADATA
from mmattn.storage.json_files import dump_json

#: No id of an entry is written like a name in here that is not JSON, such as "about".
NAMES = uuid.uuid5(uuid.NAMESPACE_DNS, "mmattn")


def key_of(name: object) -> str:
    """The UUID of an entry; 1 and "1" have two.

    Args:
        name: its id.

    >>> key_of(1)
    '599ae8f1-0430-5cdc-a98f-bc74e23890c7'
    """
    return str(uuid.uuid5(NAMES, json.dumps(name, default=repr)))


def facts_of(metadata: Any) -> list[str]:
    """One digest for each key and value of metadata, 32 hexadecimal digits; of no dict, none.

    Args:
        metadata: a JSON value.
    """
    return [_fact(key, value) for key, value in metadata.items()] if isinstance(metadata, dict) else []


def wanted_facts(filter: object) -> list[str] | None:
    """The facts that entries must have, all of them, so that a filter allows them; None allows every entry.

    Args:
        filter: as for `Index.search`.

    Raises:
        ConfigError: it is no dict, or not of JSON values.
    """
    if filter is None:
        return None
    if not isinstance(filter, Mapping):
        raise ConfigError(
            f"filter must be a dict of metadata that must be equal, got {type(filter).__name__}: a database compares "
            "where the entries are, and cannot call a function. Put what it would say into the metadata, or use a "
            "store in memory, such as 'exact'"
        )
    return [_fact(key, value) for key, value in filter.items()]


def equal_json(value: Any) -> Any:
    """The same JSON for all values that Python says are equal: True, 1 and 1.0, or dicts in any order.

    Args:
        value: a JSON value.
    """
    if isinstance(value, dict):
        return {key: equal_json(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [equal_json(one) for one in value]
    return int(value) if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()) else value


def _fact(key: str, value: Any) -> str:
    return hashlib.sha256(dump_json("filter", [key, equal_json(value)], MAX_METADATA)).hexdigest()[:32]
