"""Experiments on a model: the same batch again with another memory, and what changed, in the answer or at a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.projected import PreparedMemory
from mmattn.hosts.adapted import AdaptedModel
from mmattn.inspect.attention_figures import AttentionFigures, figures_by_layer
from mmattn.memory import Memory

# Masked slots put behind a memory, so that there is padding to look at.
EXTRA = 3
# By dtype, how far apart two ways to the same answer may be: a hundredth of what a memory does, within these bounds.
_ROUNDING = {
    torch.float64: (1e-14, 1e-12),
    torch.float32: (1e-6, 1e-4),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
}
_NOT_ASKED = ("memory", "labels", "logits_to_keep")


class Trial:
    """One adapter of a model, one batch: what the model answers to this memory or that, all else being equal.

    Answers are tensors (b, …), the first thing the host returns. Other adapters get no memory.

    Args:
        batch: what the model is called with, by name. memory: the one whose part is played here.
    """

    def __init__(self, model: AdaptedModel, name: str, batch: Mapping[str, Any], memory: Memory) -> None:
        self.model, self.name, self.memory = model, name, memory
        self.adapter = model.adapter(name)
        self.batch = {key: value for key, value in batch.items() if key not in _NOT_ASKED}

    def ask(self, memory: Memory | PreparedMemory | None) -> Tensor:
        """The answer given this memory, or none."""
        with torch.random.fork_rng(cuda_devices(self.model)):
            if memory is None:
                alone = {key: value for key, value in self.batch.items() if key not in self.model.memory_keywords}
                with self.model.disable_adapter():
                    out = self.model(**alone)
            else:
                out = self.model(**self.batch, memory={self.name: memory})
        found = out if isinstance(out, Tensor) else out[0]
        return found.to(torch.promote_types(found.dtype, torch.float32))

    @cached_property
    def answer(self) -> Tensor:
        """To the memory as it is."""
        return self.ask(self.memory)

    @cached_property
    def other(self) -> Tensor:
        """To another memory."""
        return self.ask(shuffled(self.memory))

    @cached_property
    def host(self) -> Tensor:
        """The host's own, whatever the adapters do: what they add is taken back at their layers."""
        layers = {index for name in self.model.adapters for index in self.model.adapter(name).layers}
        with contextlib.ExitStack() as stack:
            for index in layers:
                stack.enter_context(_taken_back(self.model.layer(index)))
            return self.ask(None)

    @cached_property
    def noise(self) -> float:
        """How far the same call twice is apart."""
        return apart(self.ask(self.memory), self.answer).max().item()

    @property
    def nothing(self) -> float:
        """A difference up to which nothing happened: 0 where the same call twice is bit for bit the same."""
        return 4 * self.noise

    @cached_property
    def rounding(self) -> float:
        """A difference up to which two answers may be the same one, computed in two ways."""
        kinds = {parameter.dtype for parameter in self.model.parameters()} & set(_ROUNDING)
        if torch.get_float32_matmul_precision() != "highest":
            kinds.add(torch.bfloat16)
        least, most = max(_ROUNDING[dtype] for dtype in kinds)
        effect = apart(self.other, self.answer).max().item()
        return max(self.nothing, min(most, max(least, effect / 100)))

    # At the layers -------------------------------------------------------------------------------------------------

    def at_places(
        self, memory: Memory | None, given: Mapping[int, Tensor] | None = None
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """What goes into the adapter's layers of the host and what comes out, by number.

        Args:
            given: goes in instead of what would: so each layer is seen by itself, whatever those before it do.
        """
        into: dict[int, Tensor] = {}
        out: dict[int, Tensor] = {}
        with contextlib.ExitStack() as stack:
            for index in self.adapter.layers:
                stack.enter_context(_tapped(self.model.layer(index), index, into, out, given))
            self.ask(memory)
        return into, out

    @cached_property
    def places(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """What comes out of each layer with the memory, another and none, for the same hidden states that went in."""
        into, out = self.at_places(self.memory)
        outs = [out, *(self.at_places(memory, into)[1] for memory in (shuffled(self.memory), None))]
        return {index: (outs[0][index], outs[1][index], outs[2][index]) for index in out}

    @cached_property
    def looks(self) -> dict[int, AttentionFigures]:
        """How the adapter looks at the memory, with some padding behind it, by layer."""
        with figures_by_layer(self.model, self.name) as looks:
            self.ask(padded(self.memory, 0.0))
        return looks

    def first_tokens(self) -> Tensor | None:
        """(b, m) the first token that may see each slot, the length of the text where none may; None where all may."""
        return self.adapter.first_tokens(self.memory, self.batch)


def apart(got: Tensor, want: Tensor) -> Tensor:
    """(b,) the largest difference in each row, as a share of the largest number in `want`; infinite where one is NaN.

    >>> apart(torch.tensor([[1.0, 4.0], [2.0, float("nan")]]), torch.tensor([[1.0, 3.0], [2.0, 4.0]]))
    tensor([0.2500,    inf])
    """
    same = (got == want) | (got.isnan() & want.isnan())
    far = (got - want).abs().masked_fill(same, 0).nan_to_num(torch.inf, torch.inf)
    size = want.masked_fill(~want.isfinite(), 0).abs().max().clamp(min=torch.finfo(want.dtype).tiny)
    return far.flatten(1).amax(1) / size


def shuffled(memory: Memory, where: Tensor | None = None) -> Memory:
    """Another memory of the same statistics: the channels of every vector in another order.

    Args:
        where: (b,) or (b, m) bool, which rows or slots; all by default.
    """
    order = torch.randperm(memory.dim, generator=torch.Generator().manual_seed(0)).to(memory.device)
    tokens = memory.tokens[..., order]
    if where is not None:
        where = where.to(memory.device)
        tokens = torch.where(where[..., None] if where.dim() == 2 else where[:, None, None], tokens, memory.tokens)
    return memory.replace(tokens)


def real_slots(memory: Memory) -> Tensor:
    """(b, m) which slots may be looked at."""
    if memory.mask is None:
        return torch.ones(memory.tokens.shape[:2], dtype=torch.bool, device=memory.device)
    return memory.mask.to(memory.device)


def emptied(memory: Memory, where: Tensor | None = None) -> Memory:
    """The memory with nothing in these rows (b,) that may be looked at; all rows by default."""
    real = real_slots(memory)
    kept = torch.zeros_like(real) if where is None else real & ~where.to(real.device)[:, None]
    return Memory(memory.tokens, kept, memory.segments, memory.scores, check_finite=False)


def cut(memory: Memory) -> Memory:
    """The memory with 0 slots."""
    segments, scores = (None if one is None else one[:, :0] for one in (memory.segments, memory.scores))
    return Memory(memory.tokens[:, :0], None, segments, scores)


def padded(memory: Memory, filling: float) -> Memory:
    """The memory with a few masked slots more, and ±filling in all that are masked, scores included."""
    real = real_slots(memory)
    mask = F.pad(real, (0, EXTRA))
    # Not one number all over: a normalised vector of equal numbers is the same for any.
    garbage = filling * (1 - 2 * (torch.arange(memory.dim, device=memory.device) % 2)).to(memory.dtype)
    tokens = torch.where(mask[..., None], F.pad(memory.tokens, (0, 0, 0, EXTRA)), garbage)
    segments, scores = (None if one is None else F.pad(one, (0, EXTRA)) for one in (memory.segments, memory.scores))
    scores = None if scores is None else scores.masked_fill(~mask.to(scores.device), filling)
    return Memory(tokens, mask, segments, scores, check_finite=False)


@contextlib.contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is in evaluation mode and needs no gradients; its modes come back as they were."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def cuda_devices(model: nn.Module) -> list[int]:
    """The CUDA devices that a model lies on."""
    return sorted({one.device.index for one in model.parameters() if one.device.type == "cuda"})


@contextlib.contextmanager
def _tapped(
    place: nn.Module, index: int, into: dict[int, Tensor], out: dict[int, Tensor], given: Mapping[int, Tensor] | None
) -> Iterator[None]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        into[index] = _states(args, kwargs) if given is None else given[index]
        return _with_states(into[index], args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        out[index] = output if isinstance(output, Tensor) else output[0]

    # First: an adapter that acts before its layer must be handed what is given here.
    hooks = [
        place.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        place.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _taken_back(place: nn.Module) -> Iterator[None]:
    own: list[Any] = []
    given: list[Tensor] = []
    # The first hook hears the host alone, the last one has the last word.
    hooks = [
        place.register_forward_pre_hook(
            lambda module, args, kwargs: given.append(_states(args, kwargs)), with_kwargs=True, prepend=True
        ),
        place.register_forward_pre_hook(
            lambda module, args, kwargs: _with_states(given.pop(), args, kwargs), with_kwargs=True
        ),
        place.register_forward_hook(lambda module, args, output: own.append(output), prepend=True),
        place.register_forward_hook(lambda module, args, output: own.pop()),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def _with_states(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})
