"""`Trial`: the outputs of a model for one batch and several memories, and how far they are apart."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.composed import AugmentedPrompt
from mmattn.hosts.context import Arguments, Keywords, Positional, is_reading_memory
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.probe import in_eval_mode
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
#: Masked slots that `padded` appends.
EXTRA = 3


@runtime_checkable
class RowMemory(Protocol):
    """A memory with rows: a `Memory`, prefixes, passages, or the prompts of another model."""

    @property
    def batch(self) -> int:
        """Number of rows."""

    def __getitem__(self, rows: Tensor) -> RowMemory: ...


class Trial:
    """One adapter of a model and one batch: the first output (b, …) of the model for this memory or that."""

    def __init__(self, model: AdaptedModel, name: str, batch: Keywords, memory: RowMemory) -> None:
        self.model, self.name, self.memory = model, name, memory
        self.adapter = model.adapter(name)
        self.batch = {key: value for key, value in batch.items() if key not in _LEFT_OUT}

    @property
    def slots(self) -> Memory:
        """Return the memory of checks of its slots."""
        assert isinstance(self.memory, Memory)
        return self.memory

    def run(self, memory: object) -> Tensor:
        """Return the output for a memory, or for None with the adapters disabled."""
        with torch.random.fork_rng(cuda_devices(self.model)):
            if memory is not None:
                return self._first_output(self.model(**self.batch, memory={self.name: memory}))
            with self.model.disable_adapter():
                return self._first_output(self.model(**self._bare()))

    def _bare(self) -> Arguments:
        return {key: value for key, value in self.batch.items() if key not in self.model.memory_keywords}

    def _first_output(self, out: Tensor | tuple[Tensor, ...]) -> Tensor:
        output = out if isinstance(out, Tensor) else out[0]
        if len(output) < self.memory.batch:  # multiple choice has a memory for each choice
            output = output.reshape(self.memory.batch, -1)
        return output.to(torch.promote_types(output.dtype, torch.float32))

    @cached_property
    def output(self) -> Tensor:
        """The output for the memory as it is."""
        return self.run(self.memory)

    @cached_property
    def other_output(self) -> Tensor:
        """The output for another memory."""
        return self.run(shuffled(self.memory))

    @cached_property
    def host_output(self) -> Tensor:
        """The output of the host alone, of a copy without the hooks of its adapters."""
        bare = twin(self.model)
        for hook in bare.attachment.hooks:
            hook.remove()
        with torch.random.fork_rng(cuda_devices(self.model)), bare.disable_adapter():
            return self._first_output(bare.host(**self._bare()))

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
        self, memory: RowMemory | None, fixed: Mapping[int, Tensor] | None = None
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return inputs and outputs of the host's layers that the adapter acts at; `fixed` replaces the inputs."""
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        with contextlib.ExitStack() as stack:
            for index in self.adapter.layers:
                module, part = self.model.changed_output(self.adapter, index)
                stack.enter_context(_tapped(module, part, index, inputs, outputs, fixed))
            self.run(memory)
        return inputs, outputs

    @cached_property
    def layer_outputs(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """The outputs of each layer for the memory, another one and none, with the same input."""
        inputs, full = self.states_at_layers(self.memory)
        other, bare = (self.states_at_layers(memory, inputs)[1] for memory in (shuffled(self.memory), None))
        return {index: (full[index], other[index], bare[index]) for index in full}

    def first_tokens(self) -> Tensor | None:
        """Return the first token that may attend to each slot (b, m), the text's length for none; None for all."""
        return self.adapter.first_tokens(self.slots, self.batch)


def apart(output: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference in each row (b,), relative to the largest number expected; infinite for NaN.

    >>> apart(torch.tensor([[1.0, 4.0], [2.0, float("nan")]]), torch.tensor([[1.0, 3.0], [2.0, 4.0]]))
    tensor([0.2500,    inf])
    """
    same = (output == expected) | (output.isnan() & expected.isnan())
    far = (output - expected).abs().masked_fill(same, 0).nan_to_num(torch.inf, torch.inf)
    size = expected.masked_fill(~expected.isfinite(), 0).abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    return far.flatten(1).amax(1) / size


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, without gradients."""
    with in_eval_mode(model), torch.no_grad():
        yield


def twin(model: AdaptedModel) -> AdaptedModel:
    """Return a copy of a model that shares its parameters and buffers; changes of its modules reach no other thread."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def cuda_devices(model: nn.Module) -> list[int]:
    """Return the numbers of the CUDA devices that a model has parameters on."""
    return sorted({one.device.index for one in model.parameters() if one.device.type == "cuda"})


@contextlib.contextmanager
def _tapped(
    layer: nn.Module,
    part: int,
    index: int,
    inputs: dict[int, Tensor],
    outputs: dict[int, Tensor],
    fixed: Mapping[int, Tensor] | None,
) -> Iterator[None]:
    """Store the input and the output of a layer inside the block, and replace the input by a fixed one."""

    def before(module: nn.Module, args: Positional, kwargs: Arguments) -> tuple[Positional, Arguments] | None:
        if is_reading_memory():
            return None
        inputs[index] = x = (args[0] if args else kwargs["hidden_states"]) if fixed is None else fixed[index]
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def after(module: nn.Module, args: Positional, output: Tensor | tuple[Tensor, ...]) -> None:
        if not is_reading_memory():
            outputs[index] = output if isinstance(output, Tensor) else output[part]

    # Prepended: an adapter that acts before its layer must read the fixed input.
    with layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True), layer.register_forward_hook(after):
        yield


# Other memories -----------------------------------------------------------------------------------------------------


def shuffled(memory: RowMemory, where: Tensor | None = None) -> RowMemory:
    """Return another memory of the same statistics: the channels of every vector in another order, or the rows."""
    if not isinstance(memory, Memory):
        row = torch.arange(memory.batch)
        other = memory[row.roll(-1) if where is None else torch.where(where.cpu(), row.roll(-1), row)]
        # The text of the row begins otherwise than what was read.
        return replace(other, ids=None) if isinstance(other, AugmentedPrompt) else other
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(memory.dim, generator=generator, device="cpu").to(memory.device)
    tokens = memory.tokens[..., order]
    alike = (tokens == memory.tokens).all(-1, keepdim=True)  # such as one number, or zeros
    tokens = torch.where(alike, torch.where(tokens == 0, 1, -tokens), tokens)
    if where is not None:
        where = where.to(memory.device)
        tokens = torch.where(where[..., None] if where.dim() == 2 else where[:, None, None], tokens, memory.tokens)
    return memory.replace(tokens)


def emptied(memory: Memory, where: Tensor | None = None) -> Memory:
    """Return the memory with every slot of some rows masked."""
    real = memory.real_slots()
    mask = torch.zeros_like(real) if where is None else real & ~where.to(real.device)[:, None]
    return Memory(memory.tokens, mask, memory.segments, memory.scores, check_finite=False)


def cut(memory: Memory) -> Memory:
    """Return the memory with 0 slots."""
    segments, scores = (None if one is None else one[:, :0] for one in (memory.segments, memory.scores))
    return Memory(memory.tokens[:, :0], None, segments, scores)


def padded(memory: Memory, filling: float) -> Memory:
    """Return the memory with a few more masked slots, and a number in all masked slots and their scores."""
    real = memory.real_slots()
    mask = F.pad(real, (0, EXTRA))
    # A vector of equal numbers would be the same for any number after a LayerNorm.
    garbage = filling * (1 - 2 * (torch.arange(memory.dim, device=memory.device) % 2)).to(memory.dtype)
    tokens = torch.where(mask[..., None], F.pad(memory.tokens, (0, 0, 0, EXTRA)), garbage)
    segments, scores = (None if one is None else F.pad(one, (0, EXTRA)) for one in (memory.segments, memory.scores))
    scores = None if scores is None else scores.masked_fill(~mask.to(scores.device), filling)
    return Memory(tokens, mask, segments, scores, check_finite=False)
