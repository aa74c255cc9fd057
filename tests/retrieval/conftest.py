"""A schema of a real PostgreSQL for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import psycopg
import pytest

_numbers = itertools.count()


@pytest.fixture
def schema(postgres: str) -> Iterator[str]:
    """A schema of PostgreSQL, gone after the test."""
    name = f"s{next(_numbers)}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        yield name
        connection.execute(f"DROP SCHEMA {name} CASCADE")
