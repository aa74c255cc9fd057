"""With which memories the outputs of an encoder were computed, for decoders that are given them later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mmattn.core.tensor_cache import TensorVersion


class SeenMemory:
    """The memory of one adapter in one forward of an encoder.

    Args:
        source: what the adapter read.
        scale: what multiplied its result.
    """

    def __init__(self, source: Any, scale: Any) -> None:
        self.source, self.scale = source, scale
        self._version = TensorVersion(_contents(source))

    def is_of(self, source: Any, scale: Any) -> bool:
        """Whether a call reads the same memory, as it was then."""
        contents = _contents(source)
        same = self._version.holds(contents) if contents else source is self.source
        return same and bool(scale == self.scale)


class EncoderOutputs:
    """Which outputs of an encoder were computed with which memories; kept for as long as the outputs live."""

    def __init__(self) -> None:
        self._seen: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[EncoderOutputs], tuple[()]]:
        return EncoderOutputs, ()

    def add(self, output: Any, sources: Mapping[str, tuple[Any, Any]]) -> None:
        """Note outputs.

        Args:
            output: what the encoder returned.
            sources: by adapter in the encoder, what it read and what multiplied its result.
        """
        states = first_states(output)
        if states is not None and sources:
            self._seen[states] = {name: SeenMemory(*one) for name, one in sources.items()}

    def saw(self, output: Any, sources: Mapping[str, tuple[Any, Any]]) -> bool:
        """Whether outputs are those that these memories give, or rows of them, moved or cast.

        Args:
            output: given as `encoder_outputs`.
            sources: as in `add`.
        """
        states = first_states(output)
        if states is None:
            return not sources
        own = (states, states._base)
        if not sources:
            return not any(one is not None and one in self._seen for one in own)
        for computed, seen in list(self._seen.items()):
            same = seen.keys() == sources.keys() and all(seen[name].is_of(*one) for name, one in sources.items())
            if same and (any(computed is one for one in own) or _has_rows(computed, states)):
                self._seen[states] = seen
                return True
        return False


@torch.no_grad()
def _has_rows(computed: Tensor, states: Tensor) -> bool:
    """Whether every row of some states (n, l, d) is one of those that were computed (b, l, d)."""
    if computed.shape[1:] != states.shape[1:]:
        return False
    known = computed.to(states)
    return all(bool((known == row).flatten(1).all(1).any()) for row in states)


def first_states(output: Any) -> Tensor | None:
    """The last hidden states (b, l, d) among what an encoder returns."""
    if isinstance(output, Tensor):
        return output
    values: Iterable[Any] = output.values() if isinstance(output, Mapping) else output
    return next((one for one in values if isinstance(one, Tensor)), None)


def _contents(source: Any) -> list[Tensor]:
    memory = getattr(getattr(source, "prepared", None), "memory", None)
    return [] if memory is None else list(memory.tensors())
