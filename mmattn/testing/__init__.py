"""Contract suites: what every adapter, every host and every store must do, ours and those of other packages.

    from mmattn.testing import check_adapter

    def test_my_adapter():
        check_adapter(MyAdapter(memory_dim=13), make_host)

or check by check, each with a name of its own in the report:

    @pytest.mark.parametrize("check", adapter_checks())
    def test_my_adapter(check):
        check(Case(MyAdapter(memory_dim=13), make_host))

A check is a function whose docstring is its promise. One that does not apply raises `unittest.SkipTest`, which pytest
shows as skipped.
"""

from __future__ import annotations

from typing import Any

from mmattn.adapters.settings import AdapterConfig
from mmattn.testing import adapter_answers, adapter_calls, adapter_life, hosts, stores
from mmattn.testing.case import Case, Check, MakeHost, MakeMemory, checks_of, promise, run_checks, stir
from mmattn.testing.hosts import HostCase
from mmattn.testing.stores import MakeStore

__all__ = [
    "Case",
    "HostCase",
    "adapter_checks",
    "check_adapter",
    "check_host",
    "check_store",
    "host_checks",
    "promise",
    "run_checks",
    "stir",
    "store_checks",
]


def adapter_checks() -> list[Check]:
    """Return every check of an adapter, for `pytest.mark.parametrize`: a function of a `Case`.

    >>> print(promise(adapter_checks()[0]))
    A fresh adapter with a memory leaves the host's output bit for bit unchanged.
    """
    return checks_of(adapter_answers, adapter_calls, adapter_life)


def check_adapter(
    adapter: AdapterConfig, make_host: MakeHost, make_memory: MakeMemory | None = None, rows: int = 3, **options: Any
) -> dict[str, str]:
    """Run every check of an adapter on a kind of host.

    Args:
        adapter: settings of a registered kind. Choose them so that its blocks are at several layers.
        make_host: makes the frozen model: the same weights each time, in evaluation mode, small and on the CPU.
        make_memory: makes what the adapter reads from a generator and a number of rows; its `example_memory` by
            default.
        rows: b, at least 2.
        options: further arguments of `attach`.

    Returns:
        the checks that do not apply, with the reason.

    Raises:
        AssertionError: naming each check that failed, its promise and what happened instead.
    """
    return run_checks(adapter_checks(), Case(adapter, make_host, make_memory, rows, **options))


def host_checks() -> list[Check]:
    """Return every check of a host, for `pytest.mark.parametrize`: a function of a `HostCase`."""
    return checks_of(hosts)


def check_host(make_host: MakeHost, *adapters: AdapterConfig, rows: int = 3, **options: Any) -> dict[str, str]:
    """Run every check of a kind of host.

    Args:
        make_host: as in `check_adapter`.
        adapters: settings of registered kinds, one at least for each position that the host offers; their blocks should
            be at many layers.
        rows: b, at least 2.
        options: further arguments of `attach`.

    Returns:
        the checks that do not apply, with the reason.

    Raises:
        AssertionError: naming each check that failed, its promise and what happened instead.
    """
    return run_checks(host_checks(), HostCase(make_host, adapters, rows, **options))


def store_checks() -> list[Check]:
    """Return every check of a vector store: a function of `make(dim, metric)`, which makes an empty one."""
    return checks_of(stores)


def check_store(make: MakeStore) -> None:
    """Run every check of a vector store, as `mmattn.retrieval.VectorStore` describes it.

    Args:
        make: makes an empty store of a width and metric: a registered class, or a function that calls it with settings.

    Raises:
        AssertionError: naming each check that failed, its promise and what happened instead.

    >>> from mmattn.retrieval import InMemoryStore
    >>> check_store(InMemoryStore)
    """
    run_checks(store_checks(), make)
