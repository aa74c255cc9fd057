"""The frozen layers below the lowest adapter: what they compute of texts, and forwards that begin above them.

No adapter acts there and nothing is trained there, so that their hidden states are a function of the text alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.core.tensor_cache import ModuleVersion, TensorVersion
from mmattn.hosts.context import FORWARD
from mmattn.hosts.eval_mode import in_eval_mode
from mmattn.hosts.interop.peft import active_lora
from mmattn.storage.fingerprints import fingerprint


def count_below(model: Any) -> int:
    """Number of layers below the lowest adapter and the lowest layer with a trained parameter.

    Args:
        model: the adapted model.
    """
    layers = list(model.layers)
    lowest = len(layers)
    for adapter in model.adapters.values():
        if adapter.moves_text:
            return 0
        lowest = min(lowest, adapter.layers[0] + (adapter.position == "after"))
    trained = (any(p.requires_grad for p in layer.parameters()) for layer in layers[:lowest])
    return next((number for number, one in enumerate(trained) if one), lowest)


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Inside the block the host is in evaluation mode and sees no memory, whatever forward is under way.

    Args:
        model: the adapted model.
    """
    step = FORWARD.set(None)
    try:
        with model.open_blocks.conditioned(None), in_eval_mode(model.host):
            yield
    finally:
        FORWARD.reset(step)


class FromStates:
    """A forward whose lower layers are left out: they hand on what they once computed.

    Args:
        states: hidden states (b, l, d) after them.
    """

    def __init__(self, states: Tensor) -> None:
        self.states = states

    def run(self, lower: LowerLayers, number: int, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a layer returns."""
        return own(*args, **kwargs) if number >= lower.count else lower.as_returned(number, self.states)


class UpToStates:
    """A forward whose upper layers are left out: they hand on what they are given.

    Attributes:
        states: hidden states (b, l, d) after the lower layers.
    """

    states: Tensor | None = None

    def run(self, lower: LowerLayers, number: int, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a layer returns."""
        if number >= lower.count:
            return lower.as_returned(number, args[0] if args else kwargs["hidden_states"])
        returned = own(*args, **kwargs)
        self.states = states_of(returned)
        return returned


# Whose layers, and how the forward under way runs them.
_WAY: ContextVar[tuple[LowerLayers, FromStates | UpToStates] | None] = ContextVar("mmattn_lower_layers", default=None)


class LowerLayers:
    """The layers of a language model below everything that is trained.

    Args:
        model: the adapted model.
        count: number of these layers.
        reader: the part of the host that is given the text.
        outputs: how many values each layer of the host returns, None where it returns a tensor.
        dtype: of the hidden states.
    """

    def __init__(self, model: Any, count: int, reader: Any, outputs: Sequence[int | None], dtype: torch.dtype) -> None:
        self.model, self.count, self.reader, self.outputs, self.dtype = model, count, reader, outputs, dtype
        self.layers = list(model.layers)
        self._seen: tuple[ModuleVersion, TensorVersion, list[Tensor], Any, str] | None = None

    def fingerprint(self) -> str:
        """A sha256 of their weights and of which LoRA acts in them; computed again when one has changed."""
        lora = active_lora(self.reader)
        seen = self._seen
        if seen is not None:
            parts, version, tensors, lora_then, fingerprint_then = seen
            if parts.holds() and version.holds(tensors) and lora == lora_then:
                return fingerprint_then
        upper = {part for layer in self.layers[self.count :] for part in layer.modules()}
        lower = {name: part for name, part in self.reader.named_modules() if part not in upper}
        # What accelerate has offloaded comes from a file that stays, and is another tensor after every call.
        here = [part for part in lower.values() if not _is_offloaded(part)]
        tensors = [value for part in here for _, value in _frozen(part)]
        versions = ModuleVersion(here), TensorVersion(tensors)
        found = f"{fingerprint(_Weights(lower))} {lora}"
        self._seen = (*versions, tensors, lora, found)
        return found

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block the layers of the host can be left out of a forward."""
        earlier = [layer.__dict__.get("forward") for layer in self.layers]
        for number, layer in enumerate(self.layers):
            layer.__dict__["forward"] = partial(self._run, number, layer.forward)
        try:
            yield
        finally:
            for layer, forward in zip(self.layers, earlier, strict=True):
                del layer.__dict__["forward"]
                if forward is not None:  # of accelerate, which brings offloaded weights in
                    layer.__dict__["forward"] = forward

    def _run(self, number: int, own: Any, *args: Any, **kwargs: Any) -> Any:
        way = _WAY.get()
        return (
            own(*args, **kwargs) if way is None or way[0] is not self else way[1].run(self, number, own, args, kwargs)
        )

    def as_returned(self, number: int, states: Tensor) -> Any:
        """Hidden states as a layer returns them."""
        outputs = self.outputs[number]
        return states if outputs is None else (states, *[None] * (outputs - 1))

    @contextlib.contextmanager
    def running(self, way: FromStates | UpToStates) -> Iterator[None]:
        """Inside the block forwards of the host run the layers this way."""
        outer = _WAY.set((self, way))
        try:
            yield
        finally:
            _WAY.reset(outer)

    @torch.no_grad()
    def compute(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """Hidden states (l, d) after them of texts that are read together, in evaluation mode; inside `installed`.

        Args:
            texts: ids (l,) of each, on the device of the host's embeddings.
        """
        ids = nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        lengths = torch.tensor([len(text) for text in texts], device=ids.device)
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        way = UpToStates()
        with without_adapters(self.model), self.running(way):
            self.reader(input_ids=ids, attention_mask=mask, use_cache=False)
        assert way.states is not None
        return [states[: len(text)] for states, text in zip(way.states, texts, strict=True)]

    # The forward under way ------------------------------------------------------------------------------------------

    def begin_with(self, states: Tensor) -> None:
        """Have the forward under way begin with hidden states (b, l, d) above the lower layers, until `end`."""
        _WAY.set((self, FromStates(states)))

    def end(self) -> None:
        """Have forwards run all layers again, where one began above the lower layers."""
        way = _WAY.get()
        if way is not None and way[0] is self and isinstance(way[1], FromStates):
            _WAY.set(None)

    def is_computing(self) -> bool:
        """Whether the forward under way computes hidden states for `compute`."""
        way = _WAY.get()
        return way is not None and way[0] is self and isinstance(way[1], UpToStates)


def states_of(returned: Any) -> Any:
    """The hidden states in what a layer returns.

    Args:
        returned: a tensor, or a tuple that begins with it.
    """
    return returned[0] if isinstance(returned, tuple) else returned


class _Weights(Mapping[str, Tensor]):
    """The frozen weights and buffers of modules by name, brought in one by one where they are offloaded.

    Args:
        modules: by name; each for itself.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._places = {
            f"{name}.{key}": (part, key, value) for name, part in modules.items() for key, value in _frozen(part)
        }

    def __getitem__(self, name: str) -> Tensor:
        part, key, value = self._places[name]
        offloaded: Any = getattr(part, "_hf_hook", None)
        return offloaded.weights_map[key] if value.device.type == "meta" and offloaded is not None else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _frozen(part: nn.Module) -> list[tuple[str, Tensor]]:
    """Weights and buffers of a module itself; what is trained lies above the lower layers, as the probe has seen."""
    own: dict[str, Any] = {}
    # Scales of quantised weights are neither parameters nor buffers, but part of what is saved.
    part._save_to_state_dict(own, "", keep_vars=True)
    own |= dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
    return [(name, value) for name, value in own.items() if isinstance(value, Tensor) and not value.requires_grad]


def _is_offloaded(part: nn.Module) -> bool:
    return bool(getattr(getattr(part, "_hf_hook", None), "offload", False))
