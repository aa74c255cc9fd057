"""The checks of the doctor: each runs a model again with one thing changed, and compares the outputs.

A check gives a verdict, True or False, or None for what is only reported or does not apply, and an answer in words.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.composed import AugmentedPrompt
from mmattn.errors import NonFiniteError
from mmattn.hosts.context import Arguments, Keywords, LayerOutput, Positional, is_reading_memory
from mmattn.hosts.model import AdaptedModel
from mmattn.memory import Memory

Verdict = tuple[bool | None, str]
#: Where the memory of a row is replaced by that of the next one, and nothing changes.
ALIKE = "not checked: that of the next row changes none; give two rows or more with different memories"

# Is the memory attended to -------------------------------------------------------------------------------------------


def adds(trial: Trial) -> Verdict:
    """Check that the adapter changes the hidden states at each of its layers."""
    sizes = {index: apart(full, bare).max().item() for index, (full, _, bare) in trial.layer_outputs.items()}
    silent = [index for index in trial.adapter.layers if not sizes.get(index, 0) > trial.negligible]
    if silent:
        return False, f"nothing at layers {silent}, as a fresh adapter does: train it, or see its gates"
    return True, "relative to the hidden states: " + by_layer({index: f"{size:.1%}" for index, size in sizes.items()})


def depends(trial: Trial) -> Verdict:
    """Check that each layer's update depends on the memory; `adds` reports layers without an update."""
    outputs = trial.layer_outputs
    adding = [index for index, (full, _, bare) in outputs.items() if apart(full, bare).max() > trial.negligible]
    if not adding:
        return None, "not checked: no layer adds anything"
    constant = [index for index in adding if not apart(outputs[index][1], outputs[index][0]).max() > trial.negligible]
    if not isinstance(trial.memory, Memory) and constant == adding:
        return None, ALIKE
    if constant:
        return False, f"layers {constant} add the same for another memory: a gate at 0, or dead keys and values"
    return True, "another memory changes what is added, for the same hidden states"


def another_memory(trial: Trial) -> Verdict:
    """Check that another memory changes the output of every row that has one."""
    changes = apart(trial.other_output, trial.output)
    if not isinstance(trial.memory, Memory):
        changed, b = changes > trial.negligible, trial.memory.batch
        if not bool(changed.any()):
            return None, ALIKE
        return True, f"that of the next row changes {int(changed.sum())} of {b} rows, by up to {changes.max():.1%}"
    attending = trial.slots.real_slots().any(1).to(changes.device)
    constant = (attending & ~(changes > trial.negligible)).nonzero()[:, 0].tolist()
    if constant:
        return False, (
            f"does not change the output of rows {constant}: no token of theirs may attend to a slot, or the adapter "
            "adds nothing"
        )
    return True, f"changes every row with a memory, by {changes[attending].min():.1%} to {changes[attending].max():.1%}"


# Is attended to only what may be -------------------------------------------------------------------------------------


def padding(trial: Trial) -> Verdict:
    """Check that masked slots leave the output unchanged: their presence, numbers in them, NaN in them."""
    plain = trial.run(padded(trial.slots, 0.0))
    changes = {"presence": apart(plain, trial.output).max().item()}
    for word, filling in (("large numbers", 1e3), ("NaN", torch.nan)):
        try:
            changes[word] = apart(trial.run(padded(trial.slots, filling)), plain).max().item()
        except NonFiniteError:
            changes[word] = math.inf
    return no_influence(
        changes, trial, "masked slots change the output by their", "the mask is lost before the softmax"
    )


def future(trial: Trial) -> Verdict:
    """Check that no token attends to slots of later tokens."""
    first = trial.adapter.first_tokens(trial.slots, trial.batch)
    if first is None:
        return None, "not checked: every token may attend to every slot"
    first = torch.where(trial.slots.real_slots().cpu(), first, -1)
    begins = sorted(set(first.flatten().tolist()) - {-1, 0})
    changes = {}
    for begin in begins[:: max(1, len(begins) // 3)]:
        output = trial.run(shuffled(trial.memory, first >= begin))
        changes[f"before token {begin}"] = apart(output[:, :begin], trial.output[:, :begin]).max().item()
    if not changes:
        return None, "not checked: no slot is for later tokens only"
    return no_influence(
        changes, trial, "slots for later tokens change the output", "segments, images or chunks are counted wrongly"
    )


def rows(trial: Trial) -> Verdict:
    """Check that another memory in some rows leaves the output of the others unchanged."""
    b = trial.memory.batch
    if b < 2:
        return None, "not checked: give a batch of two rows or more"
    number, leaks = torch.arange(b), {}  # every two numbers differ in a binary digit
    for digit in range((b - 1).bit_length()):
        odd = (number >> digit & 1).bool()
        for changed in (odd, ~odd):
            sizes = apart(trial.run(shuffled(trial.memory, changed)), trial.output).cpu()
            same = number[~changed].tolist()
            leaks.update({f"row {i}": sizes[i].item() for i in same if sizes[i] > trial.rounding})
    if leaks:
        return False, f"another memory in other rows changes {sizes_of(leaks)}: rows are mixed in the adapter or memory"
    return True, "each depends on its own memory only"


def empty(trial: Trial) -> Verdict:
    """Check that rows without visible slots give the host's output."""
    alone = {"0 slots": cut(trial.slots), "all slots masked": emptied(trial.slots)}
    sizes = {word: apart(trial.run(memory), trial.host_output).max().item() for word, memory in alone.items()}
    bad = {word: size for word, size in sizes.items() if size > trial.negligible}
    if trial.memory.batch > 1:
        every_second = torch.arange(trial.memory.batch) % 2 == 0
        size = apart(trial.run(emptied(trial.slots, every_second)), trial.host_output).cpu()[every_second].max().item()
        bad |= {"rows without slots among others": size} if size > trial.rounding else {}
    if bad:
        hint = "what is added must be masked where no slot may be attended to (biases, gates)"
        return False, f"the output differs from the host's: {sizes_of(bad)}; {hint}"
    return True, host_alone(trial)


def disabled(trial: Trial) -> Verdict:
    """Check that a disabled adapter gives the host's output."""
    size = apart(trial.run(None), trial.host_output).max().item()
    if size > trial.negligible:
        return False, f"the output differs from the host's by {size:.1e}: something acts outside of the adapter's call"
    return True, host_alone(trial)


# Figures ------------------------------------------------------------------------------------------------------------


def gates(trial: Trial) -> Verdict:
    """Report the openings of the gates, or of an adapter without gates the size of its value projections."""
    return openings(dict(trial.adapter.named_parameters()))


def openings(tensors: Mapping[str, Tensor]) -> Verdict:
    """Report the openings of the gates among an adapter's tensors, or else the size of its value projections."""
    word = "open by"
    gates = {name: tensor for name, tensor in tensors.items() if "gate.gate" in name}
    sizes = {name.removesuffix(".gate"): gate.float().tanh() for name, gate in gates.items()}
    if not sizes:
        word, end = "no gates; largest value weights", ".v_proj.weight"
        names = [name for name in tensors if name.startswith("blocks.") and name.endswith(end)]
        sizes = {name.removesuffix(end): tensors[name] for name in names}
    if not sizes:
        return None, "not checked: this kind has neither gates nor value projections; see whether each layer adds"
    largest = {name.removeprefix("blocks."): float(size.detach().abs().max()) for name, size in sizes.items()}
    shut = [name for name, size in largest.items() if not size > 0]
    if shut:
        return False, f"at 0: {', '.join(shut)}; a fresh adapter adds nothing until it is trained"
    return True, f"{word} {by_layer({name: f'{size:.3f}' for name, size in largest.items()})}"


def steady(trial: Trial) -> Verdict:
    """Check that two equal calls give the same output, which the other checks rely on."""
    if trial.noise == 0:
        return True, "the same output, bit for bit"
    if trial.noise > 1e-2:
        return False, f"differs by {trial.noise:.1e}: random numbers in evaluation mode, or a nondeterministic kernel"
    return None, f"differs by {trial.noise:.1e}: differences up to four times that count as none"


CHECKS: dict[str, Callable[[Trial], Verdict]] = {
    "the same call again": steady,
    "gates": gates,
    "each layer adds something": adds,
    "each layer depends on the memory": depends,
    "another memory": another_memory,
    "padding": padding,
    "slots for later tokens": future,
    "rows": rows,
    "empty memory": empty,
    "disabled": disabled,
}

#: Those that need slots of vectors: not for what else has rows.
OF_SLOTS = ("padding", "slots for later tokens", "empty memory")


# Answers ------------------------------------------------------------------------------------------------------------


def no_influence(changes: dict[str, float], trial: Trial, fault: str, hint: str) -> Verdict:
    """Return the verdict on changes of the output that may be nothing but rounding."""
    bad = {word: size for word, size in changes.items() if size > trial.rounding}
    if bad:
        return False, f"{fault}: {sizes_of(bad)}; {hint}"
    largest = max(changes.values())
    return True, f"no influence of {', '.join(changes)}" + (f" (rounding {largest:.0e})" if largest else "")


def host_alone(trial: Trial) -> str:
    """Return the answer where the output is that of the host."""
    return "the output of the host, bit for bit" if trial.noise == 0 else "the output of the host"


def sizes_of(sizes: Mapping[str, float]) -> str:
    """Return sizes by their cause, as text."""
    return ", ".join(f"{word} {size:.1e}" for word, size in sizes.items())


def by_layer(figures: Mapping[int, str] | Mapping[str, str]) -> str:
    """Return figures by layer, as text; of many, the first and the last few."""
    parts = [f"{layer} {figure}" for layer, figure in figures.items()]
    return ", ".join(parts if len(parts) <= 8 else [*parts[:4], "…", *parts[-3:]])


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

        def before(
            index: int, module: nn.Module, args: Positional, kwargs: Arguments
        ) -> tuple[Positional, Arguments] | None:
            if is_reading_memory():
                return None
            inputs[index] = x = (args[0] if args else kwargs["hidden_states"]) if fixed is None else fixed[index]
            return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

        def after(index: int, part: int, module: nn.Module, args: Positional, output: LayerOutput) -> None:
            if not is_reading_memory():
                outputs[index] = output if isinstance(output, Tensor) else output[part]

        with contextlib.ExitStack() as hooks:
            for index in self.adapter.layers:
                module, part = self.model.changed_output(self.adapter, index)
                # Prepended: an adapter that acts before its layer must read the fixed input.
                hook = module.register_forward_pre_hook(partial(before, index), with_kwargs=True, prepend=True)
                hooks.enter_context(hook)
                hooks.enter_context(module.register_forward_hook(partial(after, index, part)))
            self.run(memory)
        return inputs, outputs

    @cached_property
    def layer_outputs(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """The outputs of each layer for the memory, another one and none, with the same input."""
        inputs, full = self.states_at_layers(self.memory)
        other, bare = (self.states_at_layers(memory, inputs)[1] for memory in (shuffled(self.memory), None))
        return {index: (full[index], other[index], bare[index]) for index in full}


def apart(output: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference in each row (b,), relative to the largest number expected; infinite for NaN.

    >>> apart(torch.tensor([[1.0, 4.0], [2.0, float("nan")]]), torch.tensor([[1.0, 3.0], [2.0, 4.0]]))
    tensor([0.2500,    inf])
    """
    same = (output == expected) | (output.isnan() & expected.isnan())
    far = (output - expected).abs().masked_fill(same, 0).nan_to_num(torch.inf, torch.inf)
    size = expected.masked_fill(~expected.isfinite(), 0).abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    return far.flatten(1).amax(1) / size


def twin(model: AdaptedModel) -> AdaptedModel:
    """Return a copy of a model that shares its parameters and buffers; changes of its modules reach no other thread."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def cuda_devices(model: nn.Module) -> list[int]:
    """Return the numbers of the CUDA devices that a model has parameters on."""
    return sorted({parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"})


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
    """Return the memory with slots masked: all, those of some rows (b,), or some (b, m)."""
    real = memory.real_slots()
    hidden = torch.ones_like(real) if where is None else where.to(real.device).view(memory.batch, -1)
    return Memory(memory.tokens, real & ~hidden, memory.segments, memory.scores, check_finite=False)


def cut(memory: Memory) -> Memory:
    """Return the memory with 0 slots."""
    segments, scores = (None if part is None else part[:, :0] for part in (memory.segments, memory.scores))
    return Memory(memory.tokens[:, :0], None, segments, scores)


def padded(memory: Memory, filling: float) -> Memory:
    """Return the memory with a few more masked slots, and a number in all masked slots and their scores."""
    real = memory.real_slots()
    mask = F.pad(real, (0, EXTRA))
    # A vector of equal numbers would be the same for any number after a LayerNorm.
    garbage = filling * (1 - 2 * (torch.arange(memory.dim, device=memory.device) % 2)).to(memory.dtype)
    tokens = torch.where(mask[..., None], F.pad(memory.tokens, (0, 0, 0, EXTRA)), garbage)
    segments, scores = (None if part is None else F.pad(part, (0, EXTRA)) for part in (memory.segments, memory.scores))
    scores = None if scores is None else scores.masked_fill(~mask.to(scores.device), filling)
    return Memory(tokens, mask, segments, scores, check_finite=False)
