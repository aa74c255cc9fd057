"""The attention layers of a language model, and hooks in them that join a memory to keys and values.

A layer of transformers asks its config which function computes its attention. While adapters are joined, the config of
a layer is one that names a function of ours: that gives the host's own function what the adapters joined. The host and
its config stay as they are, and so do the masks that it makes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.protocols import HeadSizes
from mmattn.errors import AttachError, ConditionError
from mmattn.hosts.probe import in_eval_mode, output_of, text_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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


def attention_layers(host: nn.Module, layers: nn.ModuleList, path: str) -> dict[int, tuple[str, HeadSizes]]:
    """Return the attention of each decoder layer by number: its dotted name and sizes, as a short text finds them."""
    by_layer: dict[int, list[tuple[str, HeadSizes]]] = {}

    def listener(layer: int, name: str) -> Callable[[HostAttention], HostAttention]:
        def note(x: HostAttention) -> HostAttention:
            sizes = HeadSizes(x.query.shape[1], x.key.shape[1], x.key.shape[3], x.value.shape[3])
            if (name, sizes) not in by_layer.setdefault(layer, []):
                by_layer[layer].append((name, sizes))
            return x

        return note

    listeners = {
        module: listener(layer, f"{path}.{layer}.{name}")
        for layer, part in enumerate(layers)
        for name, module in part.named_modules()
        if hasattr(vars(module).get("config"), "_attn_implementation")
    }
    with attention_hooks(listeners), in_eval_mode(host), torch.no_grad():
        output_of(host, [inputs | {"use_cache": False} for inputs in text_inputs(host, 1)], 1)
    reached = {layer: layer_sites[0] for layer, layer_sites in by_layer.items() if len(layer_sites) == 1}
    missing = [layer for layer in range(len(layers)) if layer not in reached]
    if missing:
        kinds = sorted({type(layers[layer]).__name__ for layer in missing})
        raise AttachError(
            f"layers {missing} of {type(host).__name__} ({', '.join(kinds)}) do not use the attention functions of "
            "transformers, in which keys and values are joined: take a GatedAdapter for this host"
        )
    return dict(sorted(reached.items()))


@contextlib.contextmanager
def attention_hooks(listeners: Mapping[nn.Module, Callable[[HostAttention], HostAttention]]) -> Iterator[None]:
    """Inside the block these attention layers are hooked."""
    with contextlib.ExitStack() as hooks:
        for module, listener in listeners.items():
            hooks.callback(AttentionHook(module, listener).remove)
        yield
