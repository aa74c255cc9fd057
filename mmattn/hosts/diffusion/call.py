"""One call of a diffusion model with memories, and the hooks in its attention layers."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmattn.adapters.protocols import BoundMemory
from mmattn.errors import ShapeError
from mmattn.hosts.context import Call, Keywords
from mmattn.hosts.diffusion.scale import Fixed, Grid
from mmattn.storage.tensor_cache import TensorCache

#: Texts that a block caches: guidance that calls a host for each half alone gives it two in turn.
CACHED_TEXTS = 4
#: Arguments with the text of a host, the first that is there.
TEXTS = ("encoder_hidden_states", "class_labels", "text_bth")
#: Beginnings of arguments that follow the prompt, and so differ within a run.
_OF_PROMPT = ("encoder_", "pooled_", "attention_mask", "text_", "prompt_", *TEXTS)
#: Numbers at the end of a sample by which its noise is recognised: films may begin with given frames.
_LAST = 4


@dataclass(frozen=True)
class HostCall:
    """One call of a host inside a guided block."""

    host: nn.Module  # the diffusion model
    kwargs: Keywords  # its arguments by name
    picture: str  # name of the argument that is the sample

    @property
    def sample(self) -> Tensor:
        """Return the sample (rows, …)."""
        return self.kwargs[self.picture]

    @property
    def named_text(self) -> object:
        """Return the text, or None if no argument is known as one."""
        return next((self.kwargs[name] for name in TEXTS if self.kwargs.get(name) is not None), None)

    @property
    def text(self) -> object:
        """Return the text; without a known argument for it everything but the sample and its timestep."""
        if self.named_text is not None:
            return self.named_text
        return [value for each, value in sorted(self.kwargs.items()) if each not in (self.picture, "timestep")]

    def is_same(self, other: HostCall) -> bool:
        """Return whether all arguments are equal."""
        return all(equal(other.kwargs.get(name), value) for name, value in self.kwargs.items())

    def continues(self, before: HostCall) -> bool:
        """Return whether two calls are of one timestep of one run: equal time and noise, and a shared object."""
        sample, earlier = self.sample, before.sample
        if not equal(before.kwargs.get("timestep"), self.kwargs.get("timestep")) or earlier.shape != sample.shape:
            return False
        if sample is not earlier and not torch.equal(*(noise.flatten(1)[:, -_LAST:] for noise in (sample, earlier))):
            return False
        of_run = [
            value is before.kwargs.get(name)
            for name, value in self.kwargs.items()
            if isinstance(value, (Tensor, list, tuple)) and name != self.picture and not name.startswith(_OF_PROMPT)
        ]
        return any(of_run) if of_run else sample is earlier


#: Calls of a host at one timestep, and whether each is conditional.
Calls = list[tuple[HostCall, bool]]


@dataclass
class DenoisingCall(Call):
    """State shared by the forwards of one block: memories with their scales, and K/V of the text."""

    guided: bool = False  # a pipeline computes guidance: unconditional rows and calls see no memory
    parts: tuple[bool, ...] = ()  # which parts of the rows are conditional, where the caller has made them itself
    #: (b, m, e), the text of unconditional rows, where the caller declares it
    negative_prompt_embeds: Tensor | None = None
    #: by thread or asynchronous task, the calls at its present timestep
    timesteps: MutableMapping[object, Calls] = None  # type: ignore[assignment]
    text_mask: Tensor | None = None  # (rows, m) bool, the padding of the host's own text
    padding: tuple[Tensor, Tensor] | None = None  # the last bias for padding of the host's text, and its mask
    #: keys and values of the host's own text, where it goes through the core
    text: TensorCache = None  # type: ignore[assignment]
    #: the last texts of the host's layers, with their masks
    texts: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.timesteps is None and not torch.compiler.is_compiling():  # nothing is cached inside of a graph
            self.timesteps, self.text = WeakKeyDictionary(), TensorCache()

    def text_mask_of(self, text: Tensor) -> Tensor | None:
        """Return `text_mask` on the device of a text (b, m, e)."""
        if self.text_mask is not None and self.text_mask.shape != text.shape[:2]:
            shapes = f"(b, m) = {tuple(text.shape[:2])}, got {tuple(self.text_mask.shape)}"
            raise ShapeError(f"text_mask must be {shapes}")
        return None if self.text_mask is None else self.text_mask.to(text.device)

    def number_of_text(self, text: Tensor, mask: Tensor | None) -> int:
        """Return the index in `texts` of the text of a layer, which some hosts project anew at every step."""
        for number, (other, other_mask) in enumerate(self.texts):
            if equal(other, text) and equal(other_mask, mask):
                return number
        if len(self.texts) == CACHED_TEXTS:
            self.texts.clear()
        self.texts.append((text, mask))
        return len(self.texts) - 1


def equal(first: object, second: object) -> bool:
    """Return whether two arguments of a host are equal, tensors by value."""
    if first is second:
        return True
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
            return False
        return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return type(first) is type(second) and bool(first == second)


@dataclass(frozen=True)
class RowsAndScale:
    """Rows and scale of the result of an adapter in one layer at one step."""

    conditional: tuple[bool, ...]  # for each of the equal parts of the rows of the sample, True if it sees the memory
    scale: float | Tensor  # a number, (b,), (b, height, width) or (b, frames, height, width)
    #: frames, height and width of the picture as the host's first layer has it; None where it is not known
    grid: Grid | None
    to_block: bool = False  # it is added to the output of the block, not of its attention
    #: of the sample; layers of films have a row for each frame or pixel of it, those of one row one after the other.
    #: None where only a part of the host was called
    rows: int | None = None


class Reading(NamedTuple):
    """The memory of one adapter as a forward reads it."""

    name: str  # of the adapter
    source: BoundMemory
    conditional: tuple[bool, ...]  # for each of the equal parts of the rows of the sample, True if it sees the memory
    scale: Fixed  # at this timestep
    grid: Grid | None  # frames, height and width of the picture
    timestep: Tensor | float | None
    rows: int | None  # of the sample; None where only a part of the host was called
