"""The contract of vector stores as checks: what `mmattn.retrieval.VectorStore` promises, each in one function.

Without a test runner, `check_store(MyStore)` runs all of them and names the first promise that is broken. With pytest:

    @pytest.mark.parametrize("check", store_checks(), ids=lambda check: check.__name__)
    def test_my_store(check):
        check(MyStore)
"""

from __future__ import annotations

from collections.abc import Callable

from mmattn.testing import store_changes, store_searches
from mmattn.testing.store_cases import MakeStore

Check = Callable[[MakeStore], None]


def store_checks() -> list[Check]:
    """All checks, in order.

    The docstring of each is its promise. It is given what makes a store, `make(dim, metric)`, and raises AssertionError
    where the promise is broken; an error of the store itself passes through.
    """
    found = [*vars(store_searches).items(), *vars(store_changes).items()]
    return [value for name, value in found if name.startswith("check_")]


def check_store(make: MakeStore) -> None:
    """Check that a store does what `VectorStore` says.

    Args:
        make: what makes an empty store of a width and metric: a registered class, or a function that calls it with
            settings.

    Raises:
        AssertionError: the first promise that is broken, with the name of its check.

    >>> from mmattn.retrieval import InMemoryStore
    >>> check_store(InMemoryStore)
    """
    for check in store_checks():
        try:
            check(make)
        except Exception as error:
            raise AssertionError(
                f"{check.__name__}: {check.__doc__} This store: {str(error) or type(error).__name__}"
            ) from error
