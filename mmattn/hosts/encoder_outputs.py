"""The outputs of encoders, and the memories with which they were computed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mmattn.adapters.protocols import BoundMemory, Scale
from mmattn.storage.tensor_cache import TensorVersion

#: The output of an encoder, its last hidden states first or by name.
EncoderOutput = Tensor | tuple[object, ...] | Mapping[str, object]
#: By adapter, a memory and its scale.
Sources = Mapping[str, tuple[BoundMemory, Scale]]


class EncoderOutputs:
    """The memories with which outputs of an encoder were computed, for as long as the outputs live."""

    def __init__(self) -> None:
        self._computed: MutableMapping[Tensor, tuple[Sources, dict[str, TensorVersion]]] = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[EncoderOutputs], tuple[()]]:
        return EncoderOutputs, ()

    def add(self, output: EncoderOutput, sources: Sources) -> None:
        """Note what an encoder returned with these memories."""
        states = _first_states(output)
        if states is not None and sources:
            versions = {name: TensorVersion(source.sources()) for name, (source, _) in sources.items()}
            self._computed[states] = dict(sources), versions

    def match(self, output: object, sources: Sources) -> bool:
        """Return whether outputs are those that the encoder returned with these memories as they are now."""
        states = _first_states(output)
        earlier, versions = ({}, {}) if states is None else self._computed.get(states, ({}, {}))
        if sources.keys() != earlier.keys():
            return False
        for name, (source, scale) in sources.items():
            tensors = source.sources()
            same = versions[name].holds(tensors) if tensors else source is earlier[name][0]
            if not (same and bool(scale == earlier[name][1])):
                return False
        return True


def _first_states(output: object) -> Tensor | None:
    """Return the last hidden states (b, l, d) among the outputs of an encoder."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)
