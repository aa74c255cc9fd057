"""Checks of values on a device, which are reported once they are known: reading them at once would wait for the device.

A check of values on the CPU raises at once. One of values on a device computes a flag there, which is copied while the
device works on; it is looked at by the next call of the same context, or where the device is waited for anyway, such
as at the end of `generate`. Checks follow the context (`contextvars`): no thread or task reports those of another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor

from mmattn.core.tracing import may_read, readable
from mmattn.errors import NonFiniteError


class _Check:
    """A flag that is on its way from a device, and what raises if it is True."""

    def __init__(self, failed: Tensor, explain: Callable[[], None]) -> None:
        self._failed, self.explain, self._event = failed.to("cpu", non_blocking=True), explain, None
        if failed.device.type in ("cuda", "xpu"):
            self._event = torch.Event(failed.device)
            self._event.record()

    def is_known(self) -> bool:
        return self._event is None or self._event.query()

    def failed(self) -> bool:
        """Return the flag, waiting for it if it is not known."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._failed.numpy())  # numpy reads the copy; `.item()` would ask the device


# Of this context; a tuple, since contexts that were copied from this one must not see what is appended here.
_UNDER_WAY: ContextVar[tuple[_Check, ...]] = ContextVar("mmattn_checks", default=())


def not_finite(*tensors: Tensor) -> Tensor:
    """Return a bool tensor (), True if a value is NaN or infinite; so do values whose sum overflows."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    with torch.no_grad():
        total = tensors[0].sum(dtype=wide)
        for one in tensors[1:]:
            total = total + one.sum(dtype=wide)
        return total * 0 != 0  # of infinity, too, it is NaN


def refuse_if(failed: Tensor, explain: Callable[[], None]) -> None:
    """Call `explain`, which raises `NonFiniteError`, if a bool tensor () is True: now, or once that is known.

    `explain` may find nothing to refuse after all, and return. While a graph is traced, nothing is checked.
    """
    if may_read(failed):
        if bool(failed):
            explain()
    elif readable(failed):
        _UNDER_WAY.set((*_UNDER_WAY.get(), _Check(failed.detach(), explain)))


def report_checks(wait: bool = False) -> None:
    """Raise what earlier checks of this context have found; with `wait` also those that are not known yet.

    Raises:
        NonFiniteError: a check has failed.
    """
    if torch.compiler.is_compiling():
        return
    checks = _UNDER_WAY.get()
    if not checks:
        return
    failed = any(check.failed() for check in checks if wait or check.is_known())
    if not failed:
        _UNDER_WAY.set(() if wait else tuple(check for check in checks if not check.is_known()))
        return
    _UNDER_WAY.set(())  # all are named now: a later call is not refused for an earlier one again
    errors: dict[str, None] = {}
    for check in checks:
        if check.failed():
            try:
                check.explain()
            except NonFiniteError as error:
                errors[str(error)] = None
    if errors:
        raise NonFiniteError("; ".join(errors))
