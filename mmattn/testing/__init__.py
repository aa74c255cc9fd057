"""Contract suites: what every adapter, every host and every store must do, ours and those of other packages.

    from mmattn.testing import check_adapter

    def test_my_adapter():
        check_adapter(MyAdapter(memory_dim=13), make_host)

or check by check, each with a name of its own in the report:

    @pytest.mark.parametrize("check", adapter_checks())
    def test_my_adapter(check):
        check(Case(MyAdapter(memory_dim=13), make_host))
"""

from mmattn.testing.adapters import adapter_checks, check_adapter
from mmattn.testing.case import Case, stir
from mmattn.testing.hosts import HostCase, check_host, host_checks
from mmattn.testing.running import promise, run_checks
from mmattn.testing.stores import check_store, store_checks

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
    "store_checks",
    "stir",
]
