"""Blocks that give a host a memory, or take adapters away: which are open, and which hold for the call under way.

A block belongs to the frame that opened it, and holds for what that frame calls: a generator that is resumed by another
thread, or beside another generator, sees its own memory and no other. Where the frame is not on the stack (a thread or
task that was given a copy of the context; a block opened by a helper), the context variable decides.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

_HOSTS = str(Path(__file__).resolve().parent) + os.sep
_CONTEXTLIB = contextlib.__file__
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_UNCHANGED = object()


class Block:
    """One `condition` or `disable_adapter` block, or one call with `memory=`.

    Args:
        home: the blocks of its host.
        call: what calls inside it see; None is no memory.
        disabled: adapters that do not exist inside it.
    """

    def __init__(self, home: OpenBlocks, call: Any, disabled: frozenset[str]) -> None:
        self.home, self.call, self.disabled = home, call, disabled
        self.is_open = True
        self.frame: FrameType | None = None
        self.thread = 0

    def is_suspended(self) -> bool:
        """Whether a generator opened it that is not running now, although this is its thread."""
        frame = self.frame
        return frame is not None and bool(frame.f_code.co_flags & _GENERATORS) and self.thread == threading.get_ident()


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
    def conditioned(self, call: Any) -> Iterator[None]:
        """Calls inside the block see this; None is no memory."""
        with self._opened(call, frozenset()):
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
    def _opened(self, call: Any, disabled: frozenset[str]) -> Iterator[None]:
        block = Block(self, call, disabled)
        traced = torch.compiler.is_compiling()
        if not traced:
            block.frame, block.thread = _owner(sys._getframe(1)), threading.get_ident()
            self._open.append(block)
        _entered.set((*(other for other in _entered.get() if other.is_open), block))
        try:
            yield
        finally:
            # Its own entry and no other: blocks need not be left in the order they were entered in, nor where they
            # were.
            block.is_open = False
            if not traced:
                self._open.remove(block)
                block.frame = None
            _entered.set(tuple(other for other in _entered.get() if other.is_open))

    def in_force(self) -> InForce:
        """What holds for a call made here."""
        found, call = False, None
        disabled: frozenset[str] = frozenset()
        # Blocks that disable adapters hold from outside of those that give a memory, too.
        some_disable = torch.compiler.is_compiling() or any(block.disabled for block in self._open)
        for block in self._holding():
            disabled |= block.disabled
            if not found and block.call is not _UNCHANGED:
                found, call = True, block.call
                if not some_disable:
                    break
        return InForce(found, call, disabled)

    def warn_of_others(self) -> None:
        """Say once that a memory is open elsewhere, where a call finds none."""
        if self._warned or not any(block.call is not None and block.call is not _UNCHANGED for block in self._open):
            return
        self._warned = True
        warnings.warn(
            "this host is called without a memory while a block that gives it one is open elsewhere: in another "
            "thread, or in a generator that is suspended. If the call was meant to see that memory, give it memory= "
            "itself, or start the thread with the block's context: Thread(target=contextvars.copy_context().run, "
            "args=(work,))",
            stacklevel=2,
        )

    def _holding(self) -> Iterator[Block]:
        """The blocks that hold here, innermost first."""
        if torch.compiler.is_compiling():
            yield from (block for block in reversed(_entered.get()) if block.home is self and block.is_open)
            return
        owned: dict[FrameType | None, list[Block]] = {}
        for block in list(self._open):
            owned.setdefault(block.frame, []).append(block)
        held: set[Block] = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(held) < len(self._open):
            for block in reversed(owned.get(frame, ())):
                held.add(block)
                yield block
            frame = frame.f_back
        for block in reversed(_entered.get()):
            if block.home is self and block.is_open and block not in held and not block.is_suspended():
                yield block

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenBlocks:
        return OpenBlocks()


def _owner(frame: FrameType | None) -> FrameType | None:
    """The frame whose `with` opened a block, past the verbs of hosts and helpers made by `contextmanager`."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _CONTEXTLIB or file.startswith(_HOSTS):
            frame = frame.f_back
            continue
        back = frame.f_back
        helper = frame.f_code.co_flags & _GENERATORS and back is not None and back.f_code.co_filename == _CONTEXTLIB
        if not helper:
            return frame
        frame = back
    return None
