"""The memory of a call: blocks that give a host a memory or take adapters away, and the forward that is under way.

A block holds in the context (`contextvars`) that it was entered in, and in copies of that context: threads that were
started with `contextvars.copy_context().run`, and asynchronous tasks. A generator has no context of its own, so a block
that is still open when a generator yields would hold for whoever resumes it: `condition` inside a generator is refused;
there each call is given `memory=` itself.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mmattn.adapters.protocols import BoundMemory, View
from mmattn.adapters.text_state import Arrivals, GenerationInput
from mmattn.errors import ConditionError


@dataclass
class Call:
    """The memories of one call or block, by adapter."""

    #: The memory of each adapter, bound to it; and the factor of its output.
    sources: Mapping[str, BoundMemory]
    scales: Mapping[str, Any] = field(default_factory=dict)
    #: (b, l) images begun at or before each token, and how many slots of the memory had arrived there.
    images: Tensor | None = None
    arrivals: Arrivals | None = None
    #: Inside `generate`: its prompt, ids (b, l) or embeddings (b, l, d); how many rows each row of it may become;
    #: its rows; the numbers of rows that may be expanded into beams; and whether drafts leave out the last layers.
    prompt: Tensor | None = None
    expansions: Collection[int] = ()
    rows: int | None = None
    unexpanded: Collection[int] = ()
    early_exit: bool = False
    #: The host itself reads a memory in this call; it is no call of the user.
    reads_memory: bool = False

    def prepare_graphs(self) -> None:
        """Compute the inputs of a compiled host, outside of its graph."""
        for source in self.sources.values():
            source.prepare_graph()


@contextlib.contextmanager
def prepared_for_graphs(call: Call | None) -> Iterator[None]:
    """Prepare a call for a compiled host, and check it at the end of the block."""
    if call is None:
        yield
        return
    call.prepare_graphs()
    yield
    for source in call.sources.values():
        source.check_graph()


#: Arguments of a host by name, as a call gives them; and with what changes them.
Keywords = Mapping[str, Any]
Arguments = dict[str, Any]
#: Arguments of a host by their place.
Positional = tuple[Any, ...]
#: A method that stands in for another.
Method = Callable[..., Any]
#: The output of one layer of a host, hidden states first.
LayerOutput = Tensor | tuple[Any, ...]


class Handle(Protocol):
    """A hook that can be removed."""

    def remove(self) -> None:
        """Remove the hook."""


# Blocks ---------------------------------------------------------------------------------------------------------------


class InForce(NamedTuple):
    """The memory and the disabled adapters of a call; `is_set` if a block set them."""

    is_set: bool
    call: Call | None
    disabled: frozenset[str]


# One variable for all hosts: the blocks entered in this context, those since left elsewhere among them.
_BLOCKS: ContextVar[tuple[Block, ...]] = ContextVar("mmattn_blocks", default=())

# What a graph may read, since torch before 2.14 cannot compile a read of a context variable: the forward under way, and
# the blocks in force when the compiled code was called. A thread runs one forward at a time.
THREAD = threading.local()


def note_blocks() -> None:
    """Note the blocks of this context for the graph that follows."""
    THREAD.blocks = _BLOCKS.get()


def forget_blocks() -> None:
    """Forget the blocks, after a graph."""
    THREAD.blocks = None


def is_compiled() -> bool:
    """Return whether a compiled host runs, is about to, or is being traced."""
    return torch.compiler.is_compiling() or getattr(THREAD, "blocks", None) is not None


@dataclass(eq=False)
class Block:
    """One `condition` or `disable_adapter` block, or one call with `memory=`: a context manager, entered once."""

    home: OpenBlocks
    call: Call | None
    disabled: frozenset[str] = frozenset()
    #: Calls inside are given `call`, or no memory.
    gives: bool = True
    is_condition: bool = False
    #: The caller's code opens it, not a call with `memory=`: it may be open while a generator waits.
    of_caller: bool = False
    is_open: bool = True
    thread: int = 0
    #: A generator in which a function opened the block: while it is suspended, no call may find the block.
    generator: FrameType | None = None

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.home.traced.append(self)
            return
        if self.of_caller:
            self.thread, self.generator = threading.get_ident(), _generator_around(sys._getframe(1))
        if self.is_condition:
            self.home.conditions.append(self)
        blocks = _BLOCKS.get()
        while blocks and not blocks[-1].is_open:  # left in another context
            blocks = blocks[:-1]
        _BLOCKS.set((*blocks, self))

    def __exit__(self, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.home.traced.pop()
            return
        step = getattr(THREAD, "step", None)
        if step is not None and self.call is not None and step.call is self.call:
            THREAD.step = step.outer  # it was interrupted: torch runs no hooks after KeyboardInterrupt
        if self.is_condition:
            self.home.conditions.remove(self)
        self.is_open, self.call, self.generator = False, None, None
        blocks = _BLOCKS.get()
        # Blocks may be left in another order than entered, and in another context.
        _BLOCKS.set(blocks[:-1] if blocks and blocks[-1] is self else tuple(block for block in blocks if block.is_open))


class OpenBlocks:
    """The blocks of one host."""

    def __init__(self) -> None:
        #: Open `condition` blocks, in any thread.
        self.conditions: list[Block] = []
        #: Blocks opened in the graph that is being traced, where no context variable can be set.
        self.traced: list[Block] = []
        self._warned = False

    def conditioned(self, call: Call | None, is_condition: bool = False) -> Block:
        """Return a block that gives calls these memories; None for none."""
        return Block(self, call, is_condition=is_condition and call is not None, of_caller=is_condition)

    def without(self, names: Iterable[str], everything: bool) -> Block:
        """Return a block that disables some adapters, or all."""
        return Block(self, None, frozenset(names), gives=everything, of_caller=True)

    def in_force(self) -> InForce:
        """Return the memory of a call made here: that of the innermost block of this context."""
        is_set, call = False, None
        disabled: frozenset[str] = frozenset()
        noted = getattr(THREAD, "blocks", None) if torch.compiler.is_compiling() else None
        for block in reversed((*(_BLOCKS.get() if noted is None else noted), *self.traced)):
            if block.home is self and block.is_open:
                if block.generator is not None and block.thread == threading.get_ident():
                    _check_running(block.generator)
                # Blocks that disable adapters hold from outside of those that give a memory, too.
                disabled = disabled | block.disabled  # `|=` is none of torch 2.10
                if not is_set and block.gives:
                    is_set, call = True, block.call
        return InForce(is_set, call, disabled)

    def of_call(self, required: bool) -> InForce:
        """Return what is `in_force`, for a call; without a block it may not need a memory, or is meant to have one."""
        in_force = self.in_force()
        if not in_force.is_set:
            check_not_required(required)
            if not torch.compiler.is_compiling():
                self._warn_of_others()
        return in_force

    def _warn_of_others(self) -> None:
        """Warn once if a memory is set in another thread, or its block has ended, where a call has none."""
        here = threading.get_ident()
        ended = [block for block in _BLOCKS.get() if block.home is self and block.is_condition and block.thread != here]
        if self._warned or not (self.conditions or ended):
            return
        where = "is open in another thread" if self.conditions else "has ended, whose context this thread was given"
        self._warned = True
        warnings.warn(
            f"this host is called without a memory, and a condition block {where}: give the call memory=, or start "
            "the thread inside the block by Thread(target=contextvars.copy_context().run, args=(work,))",
            stacklevel=2,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> OpenBlocks:
        return OpenBlocks()


def check_not_required(required: bool) -> None:
    """Refuse a call without a memory, where one is required."""
    if required:
        raise ConditionError(
            "this host was attached with require_memory=True and called without: give memory= or use condition(); a "
            "new thread does not inherit a block"
        )


def _generator_around(frame: FrameType | None) -> FrameType | None:
    """Return the innermost generator on a stack, or None; refuse a block that the generator opens itself.

    Helpers made by `contextlib` are passed over: they wait while their block is open.
    """
    library, generators = contextlib.__file__, inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    is_opener = True
    while frame is not None:
        back = frame.f_back
        is_generator = bool(frame.f_code.co_flags & generators)
        if is_generator and (back is None or back.f_code.co_filename != library):
            if is_opener:
                raise ConditionError(
                    f"the generator {frame.f_code.co_name} opens a condition block, which would also hold for its "
                    "caller while the generator waits: give memory= to each call inside the generator"
                )
            return frame
        is_opener = is_opener and (is_generator or frame.f_code.co_filename == library)
        frame = back
    return None


def _check_running(generator: FrameType) -> None:
    """Refuse a call that finds a block which was opened inside a generator, unless the generator is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not generator:
        frame = frame.f_back
    if frame is None:
        raise ConditionError(
            f"a condition block is open in the generator {generator.f_code.co_name}, which waits: it would hold for "
            "this call, too. Give memory= to each call inside the generator"
        )


# Forwards -------------------------------------------------------------------------------------------------------------

# What a hook does at a site: a view, the block that it applies, and the factor of the result.
Action = tuple[View, nn.Module, Any]


@dataclass
class ForwardStep:
    """One forward of a host: the actions of its adapters at each site."""

    model: object
    #: The part of the host whose call began it: the host, or the model that peft has wrapped.
    module: nn.Module
    #: The forward, of this or another host, inside of which this one runs.
    outer: ForwardStep | None
    #: By number of the layer and position.
    actions: Mapping[tuple[int, str], list[Action]]
    #: Data of a kind of host.
    details: Any = None
    call: Call | None = None
    #: The layers whose hooks have run; and calls of other parts of the host that belong to this forward.
    visited: set[int] = field(default_factory=set)
    nested: int = 0
    #: Arguments by name with which the host is called instead of the caller's.
    inputs: Arguments | None = None
    #: Masks of attention that layers of this forward have made (`HostAttention.masks`).
    masks: dict[object, Any] = field(default_factory=dict)


@contextlib.contextmanager
def forward_resumed(step: ForwardStep | None) -> Iterator[None]:
    """Inside the block this forward, or none, is under way."""
    before = getattr(THREAD, "step", None)
    THREAD.step = step
    try:
        yield
    finally:
        THREAD.step = before


# What `generate` has prepared for the next forward of this thread, and of which call.
NOTED: ContextVar[tuple[Call, GenerationInput] | None] = ContextVar("mmattn_noted", default=None)


def step_of(model: object) -> ForwardStep | None:
    """Return the forward of a model's host that is under way; those of hosts that are parts of it may run inside."""
    step = getattr(THREAD, "step", None)
    while step is not None and step.model is not model:
        step = step.outer
    return step


def is_reading_memory() -> bool:
    """Return whether the forward under way is one in which a host reads a memory, not one of a text."""
    step = getattr(THREAD, "step", None)
    while step is not None and (step.call is None or not step.call.reads_memory):
        step = step.outer
    return step is not None


# Gradient checkpointing -----------------------------------------------------------------------------------------------


_ATTRIBUTE = "_gradient_checkpointing_func"


class InContext:
    """A checkpointing function whose second forward, in the backward pass, is part of the forward of the first."""

    def __init__(self, checkpoint: Method) -> None:
        self.checkpoint = checkpoint

    def __call__(self, module: Method, *args: object, **kwargs: object) -> object:
        context, step = copy_context(), getattr(THREAD, "step", None)

        def run(*given: object, **named: object) -> object:
            with forward_resumed(step):
                return context.copy().run(module, *given, **named)

        return self.checkpoint(run, *args, **kwargs)


def keep_context(host: nn.Module) -> None:
    """Have every checkpointing block of the host run again in the context of its first run, with its hooks."""
    for module in host.modules():
        checkpoint: Method | None = module.__dict__.get(_ATTRIBUTE)
        if checkpoint is not None and not isinstance(checkpoint, InContext):
            module.__dict__[_ATTRIBUTE] = InContext(checkpoint)


def forget_context(host: nn.Module) -> None:
    """Undo `keep_context`."""
    for module in host.modules():
        checkpoint = module.__dict__.get(_ATTRIBUTE)
        if isinstance(checkpoint, InContext):
            module.__dict__[_ATTRIBUTE] = checkpoint.checkpoint


def runs_hooks_again(layer: nn.Module) -> bool:
    """Return True if checkpointing wraps a layer's call with its hooks, as in older transformers, not its forward."""
    return any(
        base.__name__ == "GradientCheckpointingLayer" and "__call__" in vars(base) for base in type(layer).__mro__
    )


def refuse_reentrant(host: nn.Module) -> None:
    """Refuse recomputed layers in which the gradients of what was joined with their attention would be lost."""
    for module in host.modules():
        checkpoint: Method | None = module.__dict__.get(_ATTRIBUTE)
        if checkpoint is None or not getattr(module, "gradient_checkpointing", False):
            continue
        inner = checkpoint.checkpoint if isinstance(checkpoint, InContext) else checkpoint
        if getattr(inner, "keywords", {}).get("use_reentrant", True):
            raise ConditionError(
                f"reentrant checkpointing of {type(host).__name__} loses the gradients of joined keys and values: "
                'call activation_checkpointing_enable({"use_reentrant": False})'
            )


def refuse_other_context(layer: nn.Module) -> None:
    """Refuse a layer whose hooks would run a second time where another memory is in force, or lose its gradients."""
    if not getattr(layer, "gradient_checkpointing", False) or not runs_hooks_again(layer):
        return
    checkpoint = layer.__dict__.get(_ATTRIBUTE)
    if not isinstance(checkpoint, InContext):
        raise ConditionError(
            f"{type(layer).__name__} was called without its host or is compiled: checkpointing of this transformers "
            "would run its hooks again: call the host or upgrade transformers"
        )
    if getattr(checkpoint.checkpoint, "keywords", {}).get("use_reentrant", True):
        raise ConditionError(
            "reentrant gradient checkpointing of this transformers loses the gradients of a memory: enable it with "
            '{"use_reentrant": False}, or upgrade transformers'
        )
