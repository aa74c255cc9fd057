"""Blocks that give a host a memory, or take adapters away: which are open, and which hold for the call under way.

A block holds in the context it was entered in and in copies of that context (threads, tasks). Where a generator entered
it, the context is not enough: generators share that of whoever resumes them. Such a block holds while its generator
runs, whichever thread resumes it and whichever other generators are suspended meanwhile.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch

from mmattn.hosts.context import FORWARD

_CONTEXTLIB = contextlib.__file__
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_COROUTINE = inspect.CO_COROUTINE
_UNCHANGED = object()
_OUTERMOST = sys.maxsize


class Block:
    """One `condition` or `disable_adapter` block, or one call with `memory=`.

    Args:
        home: the blocks of its host.
        call: what calls inside it see; None is no memory.
        disabled: adapters that do not exist inside it.
        is_condition: a caller's `condition` block, inside of which other threads may be started.
    """

    def __init__(self, home: OpenBlocks, call: Any, disabled: frozenset[str], is_condition: bool) -> None:
        self.home, self.call, self.disabled = home, call, disabled
        self.gives_memory = is_condition and call is not None
        self.is_open = True
        self.generator: FrameType | None = None
        self.is_task = False
        self.thread = 0

    def holds(self, entered: bool, depths: dict[FrameType, int]) -> tuple[bool, int]:
        """Whether it holds for a call made here, and how deep on the stack its generator is.

        Args:
            entered: whether it was entered in the context of the call, or in one that was copied for it.
            depths: the frames on the stack; 0 is the innermost.
        """
        depth = _OUTERMOST if self.generator is None else depths.get(self.generator, _OUTERMOST)
        if self.generator is None or self.is_task:
            return entered, depth
        # While its generator is suspended, it holds for no one but the threads that were started inside it.
        return depth != _OUTERMOST or (entered and self.thread != threading.get_ident()), depth


# One variable for all hosts: the blocks entered in this context, those since closed elsewhere among them.
_entered: ContextVar[tuple[Block, ...]] = ContextVar("mmattn_blocks", default=())


class InForce(NamedTuple):
    """What holds for a call.

    Attributes:
        found: whether a block says which memory it sees.
        call: what it sees; None is no memory.
        disabled: adapters that do not exist for it.
    """

    found: bool
    call: Any
    disabled: frozenset[str]


class OpenBlocks:
    """The blocks of one host that are open, in any thread."""

    def __init__(self) -> None:
        self._open: list[Block] = []
        self._warned = False

    @contextlib.contextmanager
    def conditioned(self, call: Any, is_condition: bool = False) -> Iterator[None]:
        """Calls inside the block see this; None is no memory.

        Args:
            call: what they see.
            is_condition: a caller's `condition` block, inside of which other threads may be started.
        """
        with self._opened(call, frozenset(), is_condition):
            yield

    @contextlib.contextmanager
    def without(self, names: Iterable[str], everything: bool) -> Iterator[None]:
        """Inside the block these adapters do not exist, whatever memory a call gives.

        Args:
            names: of the adapters.
            everything: they are all there are, so that there is no memory either.
        """
        with self._opened(None if everything else _UNCHANGED, frozenset(names)):
            yield

    @contextlib.contextmanager
    def _opened(self, call: Any, disabled: frozenset[str], is_condition: bool = False) -> Iterator[None]:
        block = Block(self, call, disabled, is_condition)
        traced = torch.compiler.is_compiling()
        if not traced:
            block.generator, block.is_task = _generator_around(sys._getframe(1))
            block.thread = threading.get_ident()
            self._open.append(block)
        _entered.set((*(other for other in _entered.get() if other.is_open), block))
        try:
            yield
        finally:
            # Its own entry and no other: blocks may be left in another order than entered, and in another thread.
            block.is_open, block.call = False, None
            if not traced:
                self._open.remove(block)
                block.generator = None
                _end_forward_of(call)
            _entered.set(tuple(other for other in _entered.get() if other.is_open))

    def in_force(self) -> InForce:
        """What holds for a call made here."""
        found, call = False, None
        disabled: frozenset[str] = frozenset()
        for block in self._holding():
            # Blocks that disable adapters hold from outside of those that give a memory, too.
            disabled |= block.disabled
            if not found and block.call is not _UNCHANGED:
                found, call = True, block.call
        return InForce(found, call, disabled)

    def warn_of_others(self) -> None:
        """Say once that a memory is open elsewhere, or no longer, where a call finds none."""
        if self._warned:
            return
        here = threading.get_ident()
        if any(block.gives_memory for block in self._open):
            where = (
                "a condition block that gives it one is open elsewhere: in another thread, or in a generator that is "
                "suspended"
            )
        elif any(b.gives_memory and b.home is self and not b.is_open and b.thread != here for b in _entered.get()):
            where = "the condition block whose context this thread was given has ended"
        else:
            return
        self._warned = True
        warnings.warn(
            f"this host is called without a memory while {where}. If the call was meant to see that memory, give it "
            "memory= itself, or start the thread inside the block with the block's context: "
            "Thread(target=contextvars.copy_context().run, args=(work,))",
            stacklevel=2,
        )

    def _holding(self) -> list[Block]:
        """The blocks that hold here, innermost first."""
        entered = [block for block in _entered.get() if block.home is self and block.is_open]
        if torch.compiler.is_compiling() or not any(block.generator for block in self._open):
            return entered[::-1]
        depths: dict[FrameType, int] = {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            depths[frame] = len(depths)
            frame = frame.f_back
        held = []
        for order, block in enumerate(list(self._open)):
            holds, depth = block.holds(block in entered, depths)
            if holds:
                held.append((depth, -order, block))
        return [block for _, _, block in sorted(held, key=lambda one: one[:2])]

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenBlocks:
        return OpenBlocks()


def _is(frame: FrameType, flags: int) -> bool:
    return bool(frame.f_code.co_flags & flags)


def _generator_around(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """The innermost generator on the stack, and whether a task was begun inside it, which has a context of its own.

    Helpers made by `contextmanager` are left out: they are suspended while their block is open.
    """
    is_task = False
    while frame is not None:
        back = frame.f_back
        is_helper = back is not None and back.f_code.co_filename == _CONTEXTLIB
        if _is(frame, _GENERATOR) and not is_helper:
            return frame, is_task
        is_task |= _is(frame, _COROUTINE) and not (back is not None and _is(back, _COROUTINE | _GENERATOR))
        frame = back
    return None, is_task


def _end_forward_of(call: Any) -> None:
    """End a forward that was interrupted: torch runs no hooks after KeyboardInterrupt."""
    step = FORWARD.get()
    if step is not None and call is not None and step.call is call:
        FORWARD.set(step.outer)
