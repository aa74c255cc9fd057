"""The hooks through which adapters act: at the layers of a host, in their attention, and around its whole forward."""

from __future__ import annotations

import contextlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.core.tracing import UNDER_WAY, report_checks
from mmattn.errors import ConditionError
from mmattn.hosts.context import (
    THREAD,
    Arguments,
    ForwardStep,
    Handle,
    Keywords,
    LayerOutput,
    Positional,
    forget_blocks,
    is_compiled,
    keep_context,
    note_blocks,
    prepared_for_graphs,
    refuse_other_context,
    step_of,
)
from mmattn.hosts.keywords import Signature, signature_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: Whether hooks around a compiled host run beside its graph; older versions of torch compile them, in pieces.
_BESIDE_GRAPHS = torch.torch_version.TorchVersion(torch.__version__) >= "2.10"

#: What torch.compile has compile the functions that this thread calls, or None.
compiles: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback if _BESIDE_GRAPHS else lambda: None


class LayerHook(ABC):
    """Changes hidden states before or after a layer; first among its hooks: those that record must see the change."""

    @abstractmethod
    def adapt(self, x: Any) -> Any:
        """Return hidden states x (b, l, d), or several streams of them, as they are after the change."""

    def before(self, layer: nn.Module, args: Positional, kwargs: Arguments) -> tuple[Positional, Arguments]:
        """A forward pre-hook."""
        if layer.training:
            refuse_other_context(layer)
        if args:
            return (self.adapt(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.adapt(kwargs.get("hidden_states"))}

    def after(self, layer: nn.Module, args: Positional, output: LayerOutput) -> LayerOutput:
        """A forward hook."""
        if layer.training:
            refuse_other_context(layer)
        return self.adapt(output) if isinstance(output, Tensor) else (self.adapt(output[0]), *output[1:])

    def install(self, module: nn.Module, position: str) -> Handle:
        """Hook a layer "before" or "after" it."""
        if position == "before":
            return module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        return module.register_forward_hook(self.after, prepend=True)


class CrossAttentionHook(LayerHook):
    """Hands the hidden states before or after one layer of a host, or its attention, to the adapters."""

    def __init__(self, model: Any, layer: int, position: str) -> None:
        self.model, self.layer, self.site = model, layer, (layer, position)
        self.apart, self.stream_axis = model.is_apart(layer), model.stream_axis

    def install(self, module: nn.Module, position: str) -> Handle:
        return AttentionHook(module, self.join) if position == "joined" else super().install(module, position)

    def adapt(self, x: Any) -> Any:
        """Apply the adapters to hidden states x (b, l, d), several streams of them, or the attention of a layer."""
        streams, axis = x, self.stream_axis if isinstance(x, Tensor) else None
        if axis is not None:
            x = before = x.mean(axis)
        step = getattr(THREAD, "step", None)
        if step is not None and step.model is not self.model:
            step = step_of(self.model)
        if step is not None:
            step.visited.add(self.layer)
        if step is None or self.apart:
            states = x if isinstance(x, Tensor) else x.query.transpose(1, 2)
            actions = self.model.actions_of_part(states, self.site)
        else:
            actions = step.actions.get(self.site, ())
        for view, block, adapter_scale in actions:
            x = view.apply(x, block, self.layer, adapter_scale)
        return x if axis is None else streams + (x - before).unsqueeze(axis)

    def join(self, x: HostAttention) -> HostAttention:
        """Join memories with the keys and values of a layer."""
        joined, step = self.adapt(x), getattr(THREAD, "step", None)
        return joined if joined is x or step is None else replace(joined, masks=step.masks)


class HostHooks:
    """Hooks before and after the forward of a host, or of the model that peft has wrapped."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._signatures: dict[type, Signature] = {type(model.host): signature_of(model.host)}

    def install(self, host: nn.Module) -> list[Handle]:
        """Hook a host, and return the handles."""
        before = host.register_forward_pre_hook(self.before, with_kwargs=True)
        return [before, host.register_forward_hook(self.after, always_call=True)]

    def before(self, host: nn.Module, args: Positional, kwargs: Arguments) -> tuple[Positional, Arguments] | None:
        """Ask the memories of the current call what this forward attends to."""
        traced = torch.compiler.is_compiling()
        if not traced and compiles():
            return self._before_graph(host, args, kwargs)
        compiled = traced or getattr(THREAD, "blocks", None) is not None
        model, outer = self.model, getattr(THREAD, "step", None)
        if outer is not None and outer.model is model and outer.module is not host:
            outer.nested += 1  # peft calls the model that it has wrapped
            return None
        if "memory" in kwargs or "adapter_scale" in kwargs:
            refuse_misplaced(host, kwargs)
        if host.training and torch.is_grad_enabled() and not compiled:
            keep_context(host)
        call, disabled = model.call_of_forward(args, kwargs)
        if call is None:
            if outer is not None:
                THREAD.step = ForwardStep(model, host, outer, {})
            return None
        if not traced and UNDER_WAY.get():
            report_checks()
        if compiled and model.asks_by_layer(call):
            return None
        if type(host) not in self._signatures:
            self._signatures[type(host)] = signature_of(host)
        places, by_name = arguments_by_name(self._signatures[type(host)], args, kwargs)
        step = model.forward_step(call, disabled, host, places, by_name)
        step.outer, step.call = outer, call
        THREAD.step = step
        return None if step.inputs is None else (places, step.inputs)

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler
    def _before_graph(
        self, host: nn.Module, args: Positional, kwargs: Arguments
    ) -> tuple[Positional, Arguments] | None:
        note_blocks()
        return self.before(host, args, kwargs)

    def after(self, host: nn.Module, args: Positional, output: object) -> None:
        """See that memory reached every layer it was meant for, and end the forward, also when the host failed."""
        if not torch.compiler.is_compiling() and compiles():
            self._after_graph(host, args, output)
            return
        step = getattr(THREAD, "step", None)
        if step is None or step.model is not self.model:
            if is_compiled():
                self.model.note_output(output)
            return
        if step.nested and step.module is not host:
            step.nested -= 1
            return
        THREAD.step = step.outer
        if output is None:
            return
        if not step.actions:  # of an encoder-decoder, whose encoder alone reads the memory
            self.model.note_output(output)
            return
        for layer, _ in step.actions:
            if layer not in step.visited:
                if lost := self.model.lost_layers(step):
                    self.model.check_reached(lost)
                break
        self.model.check_answer(step, output)

    @torch._disable_dynamo
    def _after_graph(self, host: nn.Module, args: Positional, output: object) -> None:
        try:
            self.after(host, args, output)
        finally:
            forget_blocks()


def arguments_by_name(signature: Signature, args: Positional, kwargs: Keywords) -> tuple[Positional, Arguments]:
    """Return the arguments of a call under the names of the host's forward.

    Those given by their place get their names, and those under a deprecated name, which decorators of transformers
    still take, the name of today. Where the forward names no places they stay without names.
    """
    by_name = dict(kwargs)
    if args:
        names = signature.places[: len(args)]
        if len(args) > len(names) or set(names) & set(by_name):
            return args, by_name  # the host says itself what it does not take
        by_name = dict(zip(names, args, strict=True)) | by_name
    for old, new in signature.renamed.items():
        if old in by_name:
            value = by_name.pop(old)
            by_name.setdefault(new, value)
    return (), by_name


def refuse_misplaced(host: nn.Module, kwargs: Arguments) -> None:
    """Refuse arguments of the adapted model that a host which takes any keyword would drop in silence."""
    for name in ("memory", "adapter_scale"):
        if name in kwargs and name not in inspect.signature(type(host).forward).parameters:
            raise ConditionError(
                f"{name}= was given to the host, {type(host).__name__}, which does not read it: pass it to the adapted "
                "model that attach returned, or call the host inside its condition(memory)"
            )


def before_model(model: Any, args: Positional, kwargs: Arguments) -> tuple[Positional, Arguments] | None:
    """A forward pre-hook of an adapted model: compute what its graph is given of a memory, and note the blocks."""
    if torch.compiler.is_compiling() or not compiles():
        return None
    return _open_call(model, args, kwargs)


@torch._disable_dynamo
def _open_call(model: Any, args: Positional, kwargs: Arguments) -> tuple[Positional, Arguments]:
    stack, memory = contextlib.ExitStack(), kwargs.get("memory")
    # A tensor is new in each call, and projected in the graph.
    if memory is not None and not isinstance(memory, Tensor) and not torch.is_grad_enabled():
        kwargs = {name: value for name, value in kwargs.items() if name != "memory"}
        call = model.make_call(memory, **model.options_of(kwargs))
        stack.enter_context(prepared_for_graphs(call))
        stack.enter_context(model.open_blocks.conditioned(call))
    THREAD.calls = [*getattr(THREAD, "calls", ()), (model, stack)]
    note_blocks()
    return args, kwargs


def after_model(model: nn.Module, args: Positional, output: object) -> None:
    """A forward hook of an adapted model."""
    if not torch.compiler.is_compiling() and getattr(THREAD, "calls", None):
        _close_call(model)


@torch._disable_dynamo
def _close_call(model: nn.Module) -> None:
    if THREAD.calls[-1][0] is model:
        forget_blocks()
        THREAD.calls.pop()[1].close()


def leave_uncompiled(model: Any) -> list[Handle]:
    """Have the hooks of a compiled host run as they are, before and after its graph, and return those of the model."""
    if not _BESIDE_GRAPHS:
        return []
    from torch._dynamo.eval_frame import skip_code

    for function in (HostHooks.before, HostHooks.after, before_model, after_model):
        skip_code(function.__code__)
    return [
        model.register_forward_pre_hook(before_model, with_kwargs=True),
        model.register_forward_hook(after_model, always_call=True),
    ]


# Hooks in the attention of a layer ------------------------------------------------------------------------------------

# A layer of transformers asks its config which function computes its attention. While adapters are joined, the config
# of a layer is one that names a function of ours, which gives the host's own function what the adapters joined. The
# host and its config stay as they are, and so do the masks that it makes.

#: The name under which transformers knows our function.
NAME = "mmattn"
#: The host's functions whose masks say which token sees which key.
WITH_MASKS = ("sdpa", "eager")


class HookedConfig:
    """The config of one attention layer, with a function of ours in place of the host's own."""

    _attn_implementation = NAME

    def __init__(self, own: PreTrainedConfig, listener: Callable[[HostAttention], HostAttention]) -> None:
        self.own, self.listener = own, listener

    def __getattr__(self, name: str) -> Any:
        if name in ("own", "listener") or name.startswith("__"):  # while it is copied it has neither
            raise AttributeError(name)
        return getattr(self.own, name)


class AttentionHook:
    """A hook in the attention of one layer, until it is removed."""

    def __init__(self, module: nn.Module, listener: Callable[[HostAttention], HostAttention]) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if NAME not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
        self.module = module
        self.before: PreTrainedConfig | HookedConfig = module.config
        if isinstance(self.before, HookedConfig):
            inner = self.before.listener
            self.hooked = HookedConfig(self.before.own, lambda x: listener(inner(x)))
        else:
            self.hooked = HookedConfig(self.before, listener)
        vars(module)["config"] = self.hooked

    def remove(self) -> None:
        """Give the layer the config that it had."""
        if vars(self.module).get("config") is self.hooked:
            vars(self.module)["config"] = self.before


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the attention of a hooked layer, as transformers calls it: (b, l, h, v), and its weights or None."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    config: HookedConfig = module.config  # type: ignore[assignment]
    cache, function = options.get("cache"), own_function(module)
    if cache is not None and str(config.own._attn_implementation).removeprefix("paged|") == "sdpa":
        # As that function begins, so that a memory can stand before what is cached.
        key, value = cache.update(key, value, layer_idx=module.layer_idx, kwargs=options)
        del options["cache"]
    is_sdpa = function is sdpa_attention_forward
    plain = HostAttention(function, module, query, key, value, attention_mask, options, is_sdpa=is_sdpa)
    x = config.listener(plain)
    if x is not plain:
        check_function(config.own)
    return x.result()


def own_function(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the function that a hooked layer would call without the hook."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: HookedConfig = module.config  # type: ignore[assignment]
    for kind in type(module).__mro__:  # a plain softmax is a function beside the layer's class
        plain = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if plain is not None:
            break
    return ALL_ATTENTION_FUNCTIONS.get_interface(config.own._attn_implementation, plain)


def check_function(config: PreTrainedConfig) -> None:
    """Refuse a host whose attention has no mask, only lengths of texts."""
    name = str(config._attn_implementation)
    if name.removeprefix("paged|") not in WITH_MASKS:
        raise ConditionError(
            f"attn_implementation={name!r} has no mask, so no memory can be joined with keys and values: "
            "host.set_attn_implementation('sdpa') or 'eager'"
        )


@contextlib.contextmanager
def attention_hooks(listeners: Mapping[nn.Module, Callable[[HostAttention], HostAttention]]) -> Iterator[None]:
    """Inside the block these attention layers are hooked."""
    with contextlib.ExitStack() as hooks:
        for module, listener in listeners.items():
            hooks.callback(AttentionHook(module, listener).remove)
        yield
