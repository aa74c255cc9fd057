"""How a language model makes logits of its last hidden states, for losses that never hold all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmattn.errors import ConditionError, MmattnError
from mmattn.hosts.causal_lm.headless import HeadlessHost
from mmattn.hosts.causal_lm.position_shift import WITHIN
from mmattn.hosts.context import FORWARD
from mmattn.hosts.eval_mode import in_eval_mode
from mmattn.hosts.interop.peft import inner_host
from mmattn.hosts.probe_inputs import text_inputs


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


#: Known heads, by host.
_HEADS: WeakKeyDictionary[nn.Module, OutputHead] = WeakKeyDictionary()


def output_head(model: Any) -> OutputHead:
    """The head of a language model, read off by a probe: once for each host.

    Args:
        model: a language model of transformers, with adapters or without, or a peft model of one.

    Raises:
        ConditionError: its logits are no such function of its last hidden states, or its head is trained.
    """
    host = inner_host(getattr(model, "host", model))
    head: Any = host.get_output_embeddings()  # type: ignore[operator]
    name = type(host).__name__
    weight = getattr(head, "weight", None)
    if type(head) is not nn.Linear or type(weight) is not nn.Parameter or weight.device.type == "meta":
        raise _refused(f"the head of {name} is no plain linear layer with its weights in memory: {type(head).__name__}")
    if any(parameter.requires_grad for parameter in head.parameters()):
        raise _refused(f"the head of {name} is trained, and gradients are computed for its inputs alone: freeze it")
    known = _HEADS.get(host)
    if known is None or known.linear is not head:
        known = _HEADS[host] = _probe(model, host, head)
    return known


def last_hidden_states(model: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """What the head of a language model is given, (b, l, d).

    Args:
        model: as `output_head` takes it.
        kwargs: it is called with, `memory` among them where there is one.
    """
    if not hasattr(model, "open_blocks"):
        states: Tensor = inner_host(model).base_model(**kwargs).last_hidden_state  # type: ignore[operator]
    elif kwargs.get("memory") is None and not model.open_blocks.in_force().found:
        with model.condition(None):
            states = HeadlessHost(model)(**kwargs).last_hidden_state
    else:
        states = HeadlessHost(model)(**kwargs).last_hidden_state
    return states


@torch.no_grad()
def _probe(model: Any, host: Any, head: nn.Linear) -> OutputHead:
    """The head, as the host itself makes logits of what the linear layer gives."""
    name = type(host).__name__
    given = next(text_inputs(host, 3)) | {"use_cache": False}
    seen: list[Tensor] = []
    # From where any cap is a straight line to where it is flat.
    ramp = 10 ** torch.linspace(-4, 4, head.out_features, device=head.weight.device)

    def listen(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        seen.append(args[0])
        return ramp.expand_as(output)

    step, hook = FORWARD.set(None), head.register_forward_hook(listen)
    try:
        with _without_memory(model), in_eval_mode(host):
            logits = host(**given).logits[0, -1]
            hook.remove()
            states = host.base_model(**given).last_hidden_state
            whole = host(**given).logits.float()
            # Some hosts scale what their head is given, not what it gives.
            own = float((seen[0].double() * states.double()).sum() / states.double().square().sum())
            softcap, scale, curved = _curve(ramp.double(), logits.double())
            found = OutputHead(head, scale if abs(own - 1) < 1e-3 else own * scale, softcap)
            wanted = logits_of(found, states)
            apart = float((wanted - whole).norm() / whole.norm().clamp(min=1e-30))
    except MmattnError:
        raise
    except Exception as error:
        raise _refused(f"{name} could not be asked for its last hidden states: {error}") from error
    finally:
        hook.remove()
        FORWARD.reset(step)
    is_known = curved <= 1e-2 and (head.bias is None or found.scale == scale)
    if not is_known or not apart <= WITHIN[head.weight.element_size()]:
        raise _refused(
            f"{name} makes its logits otherwise than as a scaled or capped linear function of its last hidden states "
            f"({max(apart, curved):.0e} apart)"
        )
    return found


def _curve(x: Tensor, z: Tensor) -> tuple[float | None, float, float]:
    """Softcap s and scale c of z = s tanh(c x / s), s None of z = c x; and how far z is from it, of its size."""
    small = x < 1e-3
    scale = float((x[small] * z[small]).sum() / x[small].square().sum())
    straight = float((x * z).sum() / x.square().sum())
    if abs(straight - scale) <= 1e-2 * abs(scale):
        return None, straight, float(((straight * x - z) / (straight * x)).abs().max())
    softcap = float(z.abs().max())
    curve = softcap * torch.tanh(scale * x / softcap)
    return softcap, scale, float(((curve - z) / curve).abs().max())


def logits_of(head: OutputHead, states: Tensor) -> Tensor:
    """Logits (…, v) in float32.

    Args:
        head: of the language model.
        states: last hidden states (…, d).
    """
    logits = head.linear(states.to(head.linear.weight)).float()
    if head.scale != 1.0:
        logits = logits.mul_(head.scale)
    return logits if head.softcap is None else logits.div_(head.softcap).tanh_().mul_(head.softcap)


def _without_memory(model: Any) -> contextlib.AbstractContextManager[Any]:
    blocks = getattr(model, "open_blocks", None)
    return contextlib.nullcontext() if blocks is None else blocks.conditioned(None)


def _refused(why: str) -> ConditionError:
    return ConditionError(
        f"a loss in chunks was asked for, and {why}. Leave chunk_size (loss_chunk_size) out for this host"
    )
