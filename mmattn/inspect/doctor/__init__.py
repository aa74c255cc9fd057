"""The doctor: whether a model looks at its evidence, and whether an adapter at work does what it promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.inspect.doctor.report import Report
    from mmattn.inspect.doctor.run import diagnose, doctor

__all__ = ["Report", "diagnose", "doctor"]

__getattr__, __dir__ = lazy_exports(__name__)
