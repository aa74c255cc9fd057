"""`Trial`: the outputs of a model for one batch and several memories, and how far they are apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.augmenting_model import AugmentedPrompt
from mmattn.errors import ConditionError
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.context import is_reading_memory
from mmattn.hosts.probe import in_eval_mode
from mmattn.inspect.attention_figures import AttentionFigures, figures_by_call
from mmattn.memory import Memory

# By dtype, the least and the most that two ways to compute the same may differ by; between them, a hundredth of the
# effect of a memory.
_ROUNDING = {
    torch.float64: (1e-14, 1e-12),
    torch.float32: (1e-6, 1e-4),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
}
_LEFT_OUT = ("memory", "labels", "logits_to_keep")


class Trial:
    """One adapter of a model and one batch: the output of the model for this memory or that, all else being equal.

    Outputs are tensors (b, …), the first that the host returns. Other adapters get no memory.

    Args:
        model: the adapted model.
        name: of the adapter.
        batch: what the model is called with, by name.
        memory: the one that is varied, a `Memory`, or what else has rows.
    """

    def __init__(self, model: AdaptedModel, name: str, batch: Mapping[str, Any], memory: Any) -> None:
        self.model, self.name, self.memory = model, name, memory
        self.adapter = model.adapter(name)
        self.batch = {key: value for key, value in batch.items() if key not in _LEFT_OUT}

    def run(self, memory: Any) -> Tensor:
        """The output for a memory, or for None with the adapters disabled."""
        with torch.random.fork_rng(cuda_devices(self.model)):
            if memory is None:
                bare = {key: value for key, value in self.batch.items() if key not in self.model.memory_keywords}
                with self.model.disable_adapter():
                    out = self.model(**bare)
            else:
                out = self.model(**self.batch, memory={self.name: memory})
        output = out if isinstance(out, Tensor) else out[0]
        return output.to(torch.promote_types(output.dtype, torch.float32))

    @cached_property
    def output(self) -> Tensor:
        """For the memory as it is."""
        return self.run(self.memory)

    @cached_property
    def other_output(self) -> Tensor:
        """For another memory."""
        return self.run(shuffled(self.memory))

    @cached_property
    def host_output(self) -> Tensor:
        """The output of the host alone: whatever the adapters do at their layers is undone."""
        adapters = [self.model.adapter(name) for name in self.model.adapters]
        changed = {self.model.changed_output(one, index)[0] for one in adapters for index in one.layers}
        with contextlib.ExitStack() as stack:
            for module in changed:
                stack.enter_context(_undone(module))
            return self.run(None)

    @cached_property
    def noise(self) -> float:
        """The largest difference between two equal calls."""
        return apart(self.run(self.memory), self.output).max().item()

    @property
    def negligible(self) -> float:
        """Differences up to this one count as none: 0 where two equal calls agree bit for bit."""
        return 4 * self.noise

    @cached_property
    def rounding(self) -> float:
        """Differences up to this one may come from computing the same in two ways."""
        dtypes = {parameter.dtype for parameter in self.model.parameters()} & set(_ROUNDING)
        if torch.get_float32_matmul_precision() != "highest":
            dtypes.add(torch.bfloat16)
        least, most = max(_ROUNDING[dtype] for dtype in dtypes)
        effect = apart(self.other_output, self.output).max().item()
        return max(self.negligible, min(most, max(least, effect / 100)))

    # At the layers -------------------------------------------------------------------------------------------------

    def states_at_layers(
        self, memory: Any, given: Mapping[int, Tensor] | None = None
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The inputs and the outputs of the host's layers that the adapter acts at, by their number."""
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        with contextlib.ExitStack() as stack:
            for index in self.adapter.layers:
                module, part = self.model.changed_output(self.adapter, index)
                stack.enter_context(_tapped(module, part, index, inputs, outputs, given))
            self.run(memory)
        return inputs, outputs

    @cached_property
    def layer_outputs(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """The outputs of each layer for the memory, another one and none, with the same input."""
        inputs, full = self.states_at_layers(self.memory)
        other, bare = (self.states_at_layers(memory, inputs)[1] for memory in (shuffled(self.memory), None))
        return {index: (full[index], other[index], bare[index]) for index in full}

    @cached_property
    def figures(self) -> dict[int, AttentionFigures]:
        """Statistics of the adapter's weights over the memory with some padding appended, by layer.

        None where there are no weights, or the host's attention does not give them.
        """
        try:
            with figures_by_call(self.model) as figures:
                self.run(padded(self.memory, 0.0))
        except ConditionError:
            return {}
        return {layer: calls[-1] for (owner, layer), calls in figures.items() if owner == self.name}

    def first_tokens(self) -> Tensor | None:
        """The first token that may attend to each slot (b, m), the length of the text for none; None where all may."""
        return self.adapter.first_tokens(self.memory, self.batch)


def apart(got: Tensor, want: Tensor) -> Tensor:
    """The largest difference in each row (b,), relative to the largest number in `want`; infinite where one is NaN.

    >>> apart(torch.tensor([[1.0, 4.0], [2.0, float("nan")]]), torch.tensor([[1.0, 3.0], [2.0, 4.0]]))
    tensor([0.2500,    inf])
    """
    same = (got == want) | (got.isnan() & want.isnan())
    far = (got - want).abs().masked_fill(same, 0).nan_to_num(torch.inf, torch.inf)
    size = want.masked_fill(~want.isfinite(), 0).abs().max().clamp(min=torch.finfo(want.dtype).tiny)
    return far.flatten(1).amax(1) / size


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block a model is in evaluation mode and computes no gradients; its modes are restored afterwards."""
    with in_eval_mode(model), torch.no_grad():
        yield


def cuda_devices(model: nn.Module) -> list[int]:
    """The numbers of the CUDA devices that a model has parameters on."""
    return sorted({one.device.index for one in model.parameters() if one.device.type == "cuda"})


@contextlib.contextmanager
def _tapped(
    layer: nn.Module,
    part: int,
    index: int,
    inputs: dict[int, Tensor],
    outputs: dict[int, Tensor],
    given: Mapping[int, Tensor] | None,
) -> Iterator[None]:
    """Inside the block, the input and the output of a layer are stored, and its input is replaced by what is given."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_reading_memory():
            return None
        inputs[index] = _states(args, kwargs) if given is None else given[index]
        return _with_states(inputs[index], args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_reading_memory():
            return
        outputs[index] = output if isinstance(output, Tensor) else output[part]

    # Prepended: an adapter that acts before its layer must see what is given here.
    hooks = [
        layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        layer.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _undone(layer: nn.Module) -> Iterator[None]:
    """Inside the block, what other hooks change in the input and the output of a layer is undone."""
    outputs: list[Any] = []
    inputs: list[Tensor] = []
    # The first hook sees the host's values alone, and the last one restores them.
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(_states(args, kwargs)), with_kwargs=True, prepend=True
        ),
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: _with_states(inputs.pop(), args, kwargs), with_kwargs=True
        ),
        layer.register_forward_hook(lambda module, args, output: outputs.append(output), prepend=True),
        layer.register_forward_hook(lambda module, args, output: outputs.pop()),
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


# Masked slots that `padded` appends.
EXTRA = 3


def has_rows(memory: Any) -> bool:
    """True for memories with rows and without slots: prefixes, passages, prompts of another model."""
    return not isinstance(memory, Memory) and hasattr(memory, "__getitem__") and hasattr(memory, "batch")


def shuffled(memory: Any, where: Tensor | None = None) -> Any:
    """Another memory of the same statistics: the channels of every vector in another order, or the rows.

    A vector that another order leaves as it is, such as one number, changes its sign, and one of zeros becomes ones.
    """
    if not isinstance(memory, Memory):
        row = torch.arange(memory.batch)
        other = row.roll(-1) if where is None else torch.where(where.cpu(), row.roll(-1), row)
        moved = memory[other]
        # The text of the row begins otherwise than what was read.
        return replace(moved, ids=None) if isinstance(moved, AugmentedPrompt) else moved
    order = torch.randperm(memory.dim, generator=torch.Generator().manual_seed(0)).to(memory.device)
    tokens = memory.tokens[..., order]
    alike = (tokens == memory.tokens).all(-1, keepdim=True)
    tokens = torch.where(alike, torch.where(tokens == 0, 1, -tokens), tokens)
    if where is not None:
        where = where.to(memory.device)
        tokens = torch.where(where[..., None] if where.dim() == 2 else where[:, None, None], tokens, memory.tokens)
    return memory.replace(tokens)


def emptied(memory: Memory, where: Tensor | None = None) -> Memory:
    """The memory with every slot of some rows masked."""
    real = memory.real_slots()
    mask = torch.zeros_like(real) if where is None else real & ~where.to(real.device)[:, None]
    return Memory(memory.tokens, mask, memory.segments, memory.scores, check_finite=False)


def cut(memory: Memory) -> Memory:
    """The memory with 0 slots."""
    segments, scores = (None if one is None else one[:, :0] for one in (memory.segments, memory.scores))
    return Memory(memory.tokens[:, :0], None, segments, scores)


def padded(memory: Memory, filling: float) -> Memory:
    """The memory with a few more masked slots, and a number in all masked slots and their scores."""
    real = memory.real_slots()
    mask = F.pad(real, (0, EXTRA))
    # A vector of equal numbers would be the same for any number after a LayerNorm.
    garbage = filling * (1 - 2 * (torch.arange(memory.dim, device=memory.device) % 2)).to(memory.dtype)
    tokens = torch.where(mask[..., None], F.pad(memory.tokens, (0, 0, 0, EXTRA)), garbage)
    segments, scores = (None if one is None else F.pad(one, (0, EXTRA)) for one in (memory.segments, memory.scores))
    scores = None if scores is None else scores.masked_fill(~mask.to(scores.device), filling)
    return Memory(tokens, mask, segments, scores, check_finite=False)
