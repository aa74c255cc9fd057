"""The head of a language model: logits from last hidden states, for losses that never hold all logits at once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import call_by_name, is_on_disk, text_config
from mmattn.errors import ConditionError, MmattnError
from mmattn.hosts.causal_lm.model import HeadlessHost
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.peft import inner_host
from mmattn.hosts.probe import bare_forward, is_close, text_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Names in configs of transformers of a softcap, of a factor of logits, and of a divisor of logits.
_SOFTCAPS = ("final_logit_softcapping", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)


@dataclass(frozen=True)
class OutputHead:
    """Logits z = s tanh(c (W h + b) / s) of last hidden states h; z = c (W h + b) without s.

    Args:
        linear: W (v, d) and b (v,), frozen.
        scale: c.
        softcap: s, as in Gemma 2; None for none.
    """

    linear: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits (…, v) of last hidden states (…, d) in float32."""
        return self.scale_and_cap(self.linear(states.to(self.linear.weight)).float())

    def scale_and_cap(self, logits: Tensor) -> Tensor:
        """Scale and cap the output of the linear layer, in place."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


#: By host, its head with the calls around it as they were when it was checked, and the reason if it is refused.
_HEADS: WeakKeyDictionary[nn.Module, tuple[OutputHead, object, str | None]] = WeakKeyDictionary()


def has_output_head(model: nn.Module) -> bool:
    """Return True if `output_head` finds one."""
    try:
        output_head(model)
    except ConditionError:
        return False
    return True


def output_head(model: nn.Module) -> OutputHead:
    """Return the head of a language model by its config, compared once with the logits of the host."""
    outer: nn.Module = getattr(model, "host", model)
    host: PreTrainedModel = inner_host(outer)
    linear, name = getattr(host, "get_output_embeddings", lambda: None)(), type(host).__name__
    weight = getattr(linear, "weight", None)
    if type(linear) is not nn.Linear or type(weight) is not nn.Parameter or weight.is_meta or is_on_disk(host):
        raise _refused(
            f"the head of {name} is no plain linear layer with its weights in memory: {type(linear).__name__}"
        )
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in linear.parameters()):
        raise _refused(f"the head of {name} is trained, but gradients reach its inputs alone: freeze it")
    if _is_hooked(linear):
        raise _refused(f"hooks, or a replaced forward, of the head of {name} may change its outputs or gradients")
    config = text_config(host)
    scale = (_first(config, _FACTORS) or 1.0) / (_first(config, _DIVISORS) or 1.0)
    head = OutputHead(linear, scale, _first(config, _SOFTCAPS))
    around = [(*part._forward_pre_hooks, *part._forward_hooks, id(vars(part).get("forward"))) for part in (host, outer)]
    checked, calls, reason = _HEADS.get(host, (None, None, None))
    if (checked, calls) != (head, around):
        reason = _check_head(model, host, head)
        _HEADS[host] = head, around, reason
    if reason is not None:
        raise _refused(reason)
    return head


def _is_hooked(linear: nn.Linear) -> bool:
    """Return whether anything but the placing of accelerate acts on the inputs, outputs or gradients of a layer."""
    hooks = (linear._forward_pre_hooks, linear._forward_hooks, linear._backward_pre_hooks, linear._backward_hooks)
    is_placed = type(getattr(linear, "_hf_hook", None)).__name__ == "AlignDevicesHook"
    # torch's own function for it is newer than 2.6.
    everywhere = (f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))
    hooked = any(hooks) or any(getattr(nn.modules.module, name) for name in everywhere)
    return hooked or ("forward" in vars(linear) and not is_placed)


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> float | None:
    values = (getattr(config, name, None) for name in names)
    return next((float(value) for value in values if value), None)


@torch.no_grad()
def _check_head(model: nn.Module, host: PreTrainedModel, head: OutputHead) -> str | None:
    """Compare logits of a head with those of the host, also of outputs that any cap bends; return why they differ."""
    name, linear, kwargs = type(host).__name__, head.linear, next(text_inputs(host, 1)) | {"use_cache": False}
    ramp = torch.linspace(-100, 100, linear.out_features, device=linear.weight.device).to(linear.weight.dtype)
    try:
        with bare_forward(host, getattr(model, "open_blocks", None)):
            states = call_by_name(host.base_model, **kwargs).last_hidden_state
            pairs = [(head.logits(states), call_by_name(host, **kwargs).logits)]
            with linear.register_forward_hook(lambda module, args, output: ramp.expand_as(output)):
                bent = call_by_name(host, **kwargs).logits
            pairs.append((head.scale_and_cap(ramp.float()).expand_as(bent), bent))
    except MmattnError:
        raise
    except Exception as error:
        return f"{name} does not return its last hidden states: {error}"
    if not all(is_close(logits.to(ramp), expected.to(ramp)) for logits, expected in pairs):
        return f"the config of {name} does not say how logits follow from its last hidden states"
    return None


def last_hidden_states(model: nn.Module, kwargs: Mapping[str, object]) -> Tensor:
    """Return the inputs (b, l, d) of the head in a call with these arguments, `memory` among them if there is one."""
    if not isinstance(model, AdaptedModel):
        host: PreTrainedModel = inner_host(model)
        return call_by_name(host.base_model, **kwargs).last_hidden_state
    without = kwargs.get("memory") is None and not model.open_blocks.in_force().is_set
    with model.condition(None) if without else contextlib.nullcontext():
        states: Tensor = call_by_name(HeadlessHost(model), **kwargs).last_hidden_state
    return states


def _refused(reason: str) -> ConditionError:
    return ConditionError(f"no loss in chunks: {reason}. Leave chunk_size out for this host")
