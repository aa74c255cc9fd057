"""The values of a tensor: which may be read, traced or without waiting, and checks that are reported once known.

A check of values on the CPU raises at once. One of values on a device computes the largest there, which is copied while
the device works on. It is looked at by the next call of the same thread or task, or where the device is waited for
anyway: at the end of `generate`, and before a step of an optimizer, so that no weight learns of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mmattn.errors import NonFiniteError

# The innermost transform of `torch.func` (vmap, grad, jvp, …) that is under way, or None; a compiler cannot trace it.
transform_under_way = torch._C._functorch.peek_interpreter_stack


def readable(tensor: Tensor) -> bool:
    """Return whether a tensor has values that Python may branch on.

    It has none on the meta device, as a fake tensor, while a graph is traced or a CUDA graph captured, or inside a
    transform of `torch.func`.
    """
    return (
        not torch.compiler.is_compiling()
        # Fake tensors and those of other tracers are subclasses.
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type != "meta"
        and transform_under_way() is None
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def may_read(tensor: Tensor) -> bool:
    """Return whether a tensor is readable without waiting: on the CPU, where no queue of kernels must be finished."""
    return tensor.device.type == "cpu" and readable(tensor)


def autocast(tensor: Tensor) -> bool:
    """Return whether autocast is on for the device of a tensor."""
    # torch knows no autocast on the meta device, and raises when asked.
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def all_finite(first: Tensor, *more: Tensor) -> bool:
    """Return whether no value of some tensors is NaN or infinite; values whose sum overflows count as infinite, too."""
    # A sum is finite only if every term is, and reads the tensor once without an intermediate.
    wide = torch.float64 if first.dtype is torch.float64 else torch.float32
    total = first.detach().sum(dtype=wide)
    for one in more:
        if one is not first:
            total += one.detach().sum(dtype=wide)
    return math.isfinite(total)


T = TypeVar("T")


class _Check:
    """A number that is on its way from a device, and what raises if it is not finite."""

    def __init__(self, number: Tensor, explain: Callable[[], None]) -> None:
        self._number, self.explain = number.to("cpu", torch.float32, non_blocking=True), explain
        self._event = None
        if number.device.type in ("cuda", "xpu"):
            self._event = torch.Event(number.device)
            self._event.record()

    def is_known(self) -> bool:
        return self._event is None or self._event.query()

    def failed(self) -> bool:
        """Return whether the number is not finite, waiting for it if it is not known."""
        if self._event is not None:
            self._event.synchronize()
        return not math.isfinite(self._number.numpy())


#: Checks whose results are not known yet.
Checks = tuple[_Check, ...]
#: Of this context; a tuple, since contexts that were copied from this one must not see what is appended here.
UNDER_WAY: ContextVar[Checks] = ContextVar("mmattn_checks", default=())


def refuse_unless_finite(tensors: Sequence[Tensor], explain: Callable[[], None]) -> bool:
    """Call `explain`, which raises `NonFiniteError`, unless all values are finite: now, or once that is known.

    `explain` may find nothing to refuse after all, and return. While a graph is traced, nothing is checked: False.
    """
    if torch.compiler.is_compiling():
        return False
    tensors = [one.detach() for one in tensors if one.numel()]
    if all(map(may_read, tensors)):
        if tensors and not all_finite(*tensors):
            explain()
        return True
    if is_checked := all(map(readable, tensors)):
        UNDER_WAY.set((*UNDER_WAY.get(), _Check(get_total_norm(tensors, math.inf), explain)))
    return is_checked


def report_checks(wait: bool = False) -> None:
    """Raise what earlier checks of this context have found; with `wait` also those that are not known yet.

    Raises:
        NonFiniteError: a check has failed.
    """
    if checks := UNDER_WAY.get():
        UNDER_WAY.set(())
        UNDER_WAY.set(raise_failed(checks, wait))


@torch._disable_dynamo  # torch.compiler.disable would import the compiler
def _report_before_step(*_: object) -> None:
    report_checks(wait=True)


register_optimizer_step_pre_hook(_report_before_step)


def watch_checks(checks: Checks) -> None:
    """Raise what checks have found; have this context report those that are not known yet."""
    rest = raise_failed(checks)
    UNDER_WAY.set((*UNDER_WAY.get(), *rest))


def collect_checks(work: Callable[[], T]) -> tuple[T, Checks]:
    """Return the result of `work`, and its checks that are not known yet, which the caller then looks at itself."""
    outside = UNDER_WAY.get()
    UNDER_WAY.set(())
    try:
        return work(), UNDER_WAY.get()
    finally:
        UNDER_WAY.set(outside)


def raise_failed(checks: Checks, wait: bool = False) -> Checks:
    """Raise NonFiniteError for what checks have found, all of them at once; return those that are not known yet."""
    rest = () if wait else tuple(check for check in checks if not check.is_known())
    if any(check.failed() for check in checks if check not in rest):
        errors: dict[str, None] = {}
        for check in checks:
            if check.failed():
                try:
                    check.explain()
                except NonFiniteError as error:
                    errors[str(error)] = None
        if errors:
            raise NonFiniteError("; ".join(errors))
        return ()
    return rest
