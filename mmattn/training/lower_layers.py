"""Frozen layers below the lowest adapter: compute their hidden states, or start a forward from them.

No adapter acts there and nothing is trained there, so the hidden states are a function of the text alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import device_of, embeddings_of, text_config
from mmattn.errors import ConditionError, ConfigError, MmattnError
from mmattn.hosts.attach import adapted_model
from mmattn.hosts.context import LayerOutput, Method
from mmattn.hosts.host_state import HostState
from mmattn.hosts.model import AdaptedModel, adapted
from mmattn.hosts.peft import has_peft, inner_host
from mmattn.hosts.probe import bare_forward, is_close
from mmattn.hosts.stored import shards, tensor_parallel_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tokens of the texts of the probe.
LENGTHS = (7, 5)


class _Computed(Exception):
    """Ends a forward once the lower layers have run; holds their hidden states."""


#: The lower layers whose forward is skipped, with the hidden states (b, l, d) in their place; None to compute them.
_SKIPPED: ContextVar[tuple[LowerLayers, Tensor | None] | None] = ContextVar("mmattn_lower_layers", default=None)


@contextlib.contextmanager
def wrapped_forwards(modules: Sequence[nn.Module], wrap: Callable[[nn.Module], Method]) -> Iterator[None]:
    """Replace the forward of each module inside the block; one of its own, such as accelerate's, comes back."""
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        vars(module)["forward"] = wrap(module)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


class LowerLayers:
    """The layers of a language model below everything that is trained."""

    def __init__(self, model: AdaptedModel, count: int) -> None:
        self.model, self.count = model, count
        self.layers = list(model.layers)
        host: PreTrainedModel = inner_host(model.host)
        # OPT calls the decoder inside its base model.
        self.reader: PreTrainedModel = host.get_decoder() or host.base_model
        #: Number of outputs of each layer, None for a tensor.
        self.outputs: list[int | None] = []
        self._state: HostState | None = None

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Let forwards skip these layers inside the block; they are run unless `skip` says otherwise."""
        lower = self.layers[: self.count]
        return wrapped_forwards(lower, lambda layer: partial(self._forward, lower.index(layer), layer.forward))

    @contextlib.contextmanager
    def skipped_by(self, before: Callable[..., object]) -> Iterator[None]:
        """Let a pre-hook of the base model `skip` these layers in forwards inside the block."""
        skips = self.reader.register_forward_pre_hook(before, with_kwargs=True)
        # Called after a failure, too.
        runs = self.reader.register_forward_hook(self.run, always_call=True)
        try:
            with self.installed(), skips, runs:
                yield
        finally:
            self.run()

    def _forward(
        self, number: int, forward: Callable[..., LayerOutput], *args: object, **kwargs: object
    ) -> LayerOutput:
        skipped = _SKIPPED.get()
        if skipped is None or skipped[0] is not self:
            return forward(*args, **kwargs)
        if skipped[1] is not None:
            outputs = self.outputs[number]
            return skipped[1] if outputs is None else (skipped[1], *[None] * (outputs - 1))
        output = forward(*args, **kwargs)
        if number == self.count - 1:
            raise _Computed(_states_of(output))
        return output

    def skip(self, states: Tensor) -> None:
        """Start forwards from hidden states (b, l, d) after these layers, until `run`."""
        _SKIPPED.set((self, states))

    def run(self, *_: object) -> None:
        """Run all layers again, after `skip`; also a hook of the base model."""
        if (skipped := _SKIPPED.get()) is not None and skipped[0] is self and skipped[1] is not None:
            _SKIPPED.set(None)

    def is_computing(self) -> bool:
        """Return whether `compute` is under way."""
        skipped = _SKIPPED.get()
        return skipped is not None and skipped[0] is self and skipped[1] is None

    @torch.no_grad()
    def compute(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """Return the hidden states (l, d) of texts, ids (l,) each, in evaluation mode; inside `installed`."""
        ids = nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        lengths = torch.tensor([len(text) for text in texts], device=ids.device)
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        with bare_forward(self.model.host, self.model.open_blocks):
            together = self.states_of(input_ids=ids, attention_mask=mask, use_cache=False)
        return [states[: len(text)] for states, text in zip(together, texts, strict=True)]

    def states_of(self, **kwargs: object) -> Tensor:
        """Return the hidden states (b, l, d) in a call of the base model; inside `installed`."""
        outer = _SKIPPED.set((self, None))
        try:
            self.reader(**kwargs)
        except _Computed as computed:
            return computed.args[0]
        finally:
            _SKIPPED.reset(outer)
        raise ConditionError(f"layer {self.count - 1} of {type(self.model.host).__name__} was not run")

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules of the base model that are not in upper layers."""
        upper = {part for layer in self.layers[self.count :] for part in layer.modules()}
        return {name: part for name, part in self.reader.named_modules() if part not in upper}

    def state(self) -> HostState:
        """Return with what they compute now: the same object until that changes."""
        if self._state is None or not self._state.holds():
            self._state = HostState(self.reader, self.modules())
        return self._state


def count_below(model: AdaptedModel) -> int:
    """Return the number of layers below the lowest adapter and the lowest trained parameter."""
    lowest = len(model.layers)
    for adapter in map(model.adapter, model.adapters):
        if adapter.traits.moves_text:
            return 0
        first: int = adapter.layers[0]
        lowest = min(lowest, first + (adapter.position == "after"))
    trained = (any(p.requires_grad for p in layer.parameters()) for layer in list(model.layers)[:lowest])
    return next((number for number, one in enumerate(trained) if one), lowest)


def lower_layers(model: nn.Module) -> LowerLayers:
    """Return the layers below the lowest adapter, after a check that forwards can start above them.

    Two texts run through the whole host and again from the hidden states: the logits must be equal bit for bit; from
    hidden states of each text alone, but for rounding.
    """
    if not isinstance(model, AdaptedModel) and has_peft(model) and not adapted(model):
        model = adapted_model(model, None)  # a LoRA alone
    elif not (isinstance(model, AdaptedModel) and model.predicts_tokens and model.adapters):
        raise ConfigError(
            f"hidden states are cached for a causal language model with adapters or a LoRA, got {type(model).__name__}:"
            " give what mmattn.attach or peft returned for one"
        )
    lower, (ids, mask) = _frozen_layers(model), _texts(model.host, 0)
    name, count = type(model.host).__name__, lower.count
    whole, states = _record(lower, ids, mask)
    try:
        with lower.installed(), torch.no_grad():
            with bare_forward(model.host, model.open_blocks):
                _logits(model.host, *_texts(model.host, 1))  # so that states of the last text cannot help
            again = _logits_from(lower, states, ids, mask)
            alone = torch.zeros_like(states)
            for row, length in enumerate(LENGTHS):
                alone[row, :length] = lower.compute([ids[row, :length]])[0]
            near = _logits_from(lower, alone, ids, mask)
    except MmattnError:
        raise
    except Exception as error:
        raise ConditionError(
            f"{name} cannot run from the hidden states after layer {count - 1}, so these cannot be cached: "
            f"{type(error).__name__}: {error}"
        ) from error
    real = mask.bool()
    if not torch.equal(whole, again) or not is_close(near[real], whole[real]):
        raise ConditionError(
            f"{name} has other logits from the hidden states after layer {count - 1}, so these cannot be cached: upper "
            "layers read more of the lower ones; leave the cache out"
        )
    return lower


def _frozen_layers(model: AdaptedModel) -> LowerLayers:
    """Return the layers below all that is trained; raise if no layer can be skipped."""
    name, count = type(model.host).__name__, count_below(model)
    if not count:
        upper = tuple(range(len(model.layers) // 2, len(model.layers)))
        raise ConditionError(
            f"no layer of {name} is below all trained ones: an adapter acts at its first layer or before the text, or "
            f"a LoRA is there; give higher layers, such as layers={upper}"
        )
    if shards(model.host) or tensor_parallel_size(model.host) > 1:
        raise ConditionError(
            f"the weights of {name} lie in several processes, which must run every layer together: leave the cache "
            "out, or give each process the whole host"
        )
    lower = LowerLayers(model, count)
    if any(p.requires_grad for part in lower.modules().values() for p in part.parameters(recurse=False)):
        raise ConditionError(
            f"a parameter below layer {count} of {name} is trained (its embeddings, for one), so hidden states change "
            "with every step: freeze it, or leave the cache out"
        )
    return lower


def _record(lower: LowerLayers, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of texts and the hidden states (b, l, d) after the lower layers."""
    model, name = lower.model, type(lower.model.host).__name__
    called: list[nn.Module] = []
    last: list[Tensor] = []

    def note(layer: nn.Module, args: object, output: LayerOutput) -> None:
        called.append(layer)
        lower.outputs.append(len(output) if isinstance(output, tuple) else None)
        if len(called) == lower.count:
            last.append(_states_of(output))

    with contextlib.ExitStack() as hooks, bare_forward(model.host, model.open_blocks), torch.no_grad():
        for layer in lower.layers:
            hooks.enter_context(layer.register_forward_hook(note, prepend=True))
        whole = _logits(model.host, ids, mask)
    states = last[0] if called == lower.layers else None
    if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[:2] != ids.shape:
        raise ConditionError(
            f"the layers of {name} are not run once each, one after the other, on hidden states (b, l, d), so these "
            "cannot be cached"
        )
    return whole, states


def _states_of(returned: LayerOutput) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned


def _texts(host: nn.Module, shift: int) -> tuple[Tensor, Tensor]:
    """Return two texts of unequal length as ids (2, l) and attention mask."""
    device, size = device_of(embeddings_of(host)), getattr(text_config(host), "vocab_size", 2)
    place = torch.arange(2 * max(LENGTHS), device=device).view(2, -1)
    mask = (place[:1] < torch.tensor(LENGTHS, device=device)[:, None]).long()
    return (place * 7 + 5 + shift) % size * mask, mask


def _logits(host: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return host(input_ids=ids, attention_mask=mask, use_cache=False).logits


def _logits_from(lower: LowerLayers, states: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    lower.skip(states)
    try:
        with bare_forward(lower.model.host, lower.model.open_blocks):
            return _logits(lower.model.host, ids, mask)
    finally:
        lower.run()
