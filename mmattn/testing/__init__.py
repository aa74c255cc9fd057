"""Contract suites: what every store must do, for ours and for those of third parties."""

from __future__ import annotations

from mmattn.testing.stores import check_store, store_checks

__all__ = ["check_store", "store_checks"]
