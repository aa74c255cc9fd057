"""Proof that a host whose lower layers are left out answers as the whole host does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.language_models import device_of, embeddings_of, text_config
from mmattn.errors import ConditionError, ConfigError, MmattnError
from mmattn.hosts.causal_lm.lower_layers import (
    FromStates,
    LowerLayers,
    count_below,
    states_of,
    without_adapters,
)
from mmattn.hosts.causal_lm.model import AdaptedCausalLM
from mmattn.hosts.causal_lm.position_shift import WITHIN
from mmattn.hosts.interop.peft import inner_host
from mmattn.hosts.interop.sharded import shards, tensor_parallel_size

#: Tokens of the texts with which a host is tried.
LENGTHS = (7, 5)


def lower_layers(model: Any) -> LowerLayers:
    """The layers of a language model below its lowest adapter, and proof that forwards can begin above them.

    Two texts are read by the whole host, and again from the hidden states above these layers: the answers must be equal
    bit for bit. From states of each text read alone they must be equal but for rounding.

    Args:
        model: the adapted model.

    Raises:
        ConfigError: no causal language model with adapters.
        ConditionError: there are no such layers, something below them is trained, the host's weights lie in several
            processes, or what the upper layers compute does not follow from the hidden states alone.
    """
    if not (isinstance(model, AdaptedCausalLM) and model.adapters):
        raise ConfigError(
            f"hidden states below the lowest adapter are those of a causal language model with adapters, and this is a "
            f"{type(model).__name__}: give what mmattn.attach returned for one"
        )
    name, count = type(model.host).__name__, count_below(model)
    if not count:
        upper = tuple(range(len(model.layers) // 2, len(model.layers)))
        raise ConditionError(
            f"no layer of {name} is below everything that is trained: an adapter acts at its first layer or before the "
            f"text, or a LoRA is trained there. Give the adapter higher layers, such as layers={upper}"
        )
    if shards(model.host) or tensor_parallel_size(model.host) > 1:
        raise ConditionError(
            f"the weights of {name} lie in several processes, which must run every layer together: one that reads what "
            "the lower layers compute from a cache would leave the others waiting. Leave the cache out, or give each "
            "process the whole host"
        )
    ids, mask = _texts(model.host, 0)
    lower, states, whole = _recorded(model, count, ids, mask)
    if _is_trained_below(model, states):
        raise ConditionError(
            f"a parameter below layer {count} of {name} is trained (its embeddings, for one), so that what its lower "
            "layers compute changes with every step: freeze it, or leave the cache out"
        )
    try:
        with lower.installed():
            # What a host may keep of its last text must not be of use.
            with without_adapters(model), torch.no_grad():
                _logits(model.host, *_texts(model.host, 1))
            states = states.detach()
            again = _from(lower, states, ids, mask)
            alone = torch.zeros_like(states)
            for row, length in enumerate(LENGTHS):
                alone[row, :length] = lower.compute([ids[row, :length]])[0]
            near = _from(lower, alone, ids, mask)
    except MmattnError:
        raise
    except Exception as error:
        raise ConditionError(
            f"{name} cannot be run from the hidden states after layer {count - 1} on, so that these cannot be cached: "
            f"{type(error).__name__}: {error}"
        ) from error
    real = mask.bool()
    wanted, found = whole[real], near[real]
    apart = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    if not torch.equal(whole, again) or not apart <= WITHIN[whole.element_size()]:
        raise ConditionError(
            f"{name} answers otherwise when it begins with the hidden states after layer {count - 1}, so that these "
            "cannot be cached: its upper layers read more of the lower ones (keys and values that they share, earlier "
            "states), or a token sees later ones. Leave the cache out"
        )
    return lower


def _is_trained_below(model: Any, states: Tensor) -> bool:
    """Whether hidden states depend on a parameter that is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not states.requires_grad or not trained:
        return False
    # Embedded texts may be asked for gradients alone, as transformers does for gradient checkpointing.
    found = torch.autograd.grad(states.float().sum(), trained, allow_unused=True)
    return any(gradient is not None for gradient in found)


def _texts(host: nn.Module, shift: int) -> tuple[Tensor, Tensor]:
    """Two texts of unequal length as ids (2, l) and attention mask."""
    device, size = device_of(embeddings_of(host)), getattr(text_config(host), "vocab_size", 2)
    place = torch.arange(2 * max(LENGTHS), device=device).view(2, -1)
    mask = (place[:1] < torch.tensor(LENGTHS, device=device)[:, None]).long()
    return (place * 7 + 5 + shift) % size * mask, mask


def _logits(host: Any, ids: Tensor, mask: Tensor) -> Tensor:
    logits: Tensor = host(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits


@torch.no_grad()
def _from(lower: LowerLayers, states: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    with without_adapters(lower.model), lower.running(FromStates(states)):
        return _logits(lower.model.host, ids, mask)


def _recorded(model: Any, count: int, ids: Tensor, mask: Tensor) -> tuple[LowerLayers, Tensor, Tensor]:
    """The lower layers as one forward shows them, the hidden states after them, and its answer.

    Raises:
        ConditionError: layers do not run one after the other, or hand on something else than states (b, l, d).
    """
    order: list[int] = []
    returned: dict[int, Any] = {}
    called: list[nn.Module] = []

    def listen(number: int) -> Any:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            order.append(number)
            returned[number] = output

        return hook

    around = _around(model)
    hooks = [layer.register_forward_hook(listen(number), prepend=True) for number, layer in enumerate(model.layers)]
    hooks += [part.register_forward_pre_hook(lambda part, args: called.append(part)) for part in around]
    try:
        with without_adapters(model), torch.enable_grad():
            whole = _logits(model.host, ids, mask).detach()
    finally:
        for handle in hooks:
            handle.remove()
    name, states = type(model.host).__name__, states_of(returned.get(count - 1))
    shape = tuple(states.shape) if isinstance(states, Tensor) else type(states).__name__
    if order != list(range(len(model.layers))) or len(shape) != 3 or shape[:2] != tuple(ids.shape):
        raise ConditionError(
            f"the layers of {name} are not run once each, one after the other, or hand on {shape} for texts (2, "
            f"{ids.shape[1]}) in place of hidden states (b, l, d), so that what the lower ones compute cannot be cached"
        )
    reader = next((part for part in around if part in called), inner_host(model.host))
    outputs = [len(value) if isinstance(value, tuple) else None for _, value in sorted(returned.items())]
    return LowerLayers(model, count, reader, outputs, states.dtype), states, whole


def _around(model: Any) -> Sequence[nn.Module]:
    """The parts of the host, from the outermost on, that have the layers in them."""
    parts = dict(inner_host(model.host).named_modules())
    names = next(name for name, part in parts.items() if part is model.layers).split(".")
    return [parts[".".join(names[:end])] for end in range(1, len(names))]
