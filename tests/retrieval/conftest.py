"""Databases that tests of stores share: started once, and emptied by names of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import databases


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL database with pgvector."""
    with databases.postgres() as address:
        yield address
