"""Cross-entropy of a language model in nats, by a head that never holds all logits at once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.host_models import call_by_name, is_on_disk, text_config
from mmattn.core.tracing import may_read
from mmattn.data.text_batches import IGNORED, TextBatch
from mmattn.errors import ConditionError, MmattnError, check_int
from mmattn.hosts.causal_lm.model import HeadlessHost
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.peft import inner_host
from mmattn.hosts.probe import bare_forward, is_close, text_inputs
from mmattn.hosts.stored import shards, tensor_parallel_size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ChunkSize = int | Literal["auto"] | None
AUTO_CHUNK = 256  # tokens


def token_nats(model: nn.Module, batch: TextBatch, chunk_size: ChunkSize = "auto") -> Tensor:
    """Return the cross-entropy -log p of each token given earlier tokens and the memory, (b, l - 1); 0 on the padding.

    Entry (i, j) is of token j + 1 of row i: the first token is not predicted.

    Args:
        model: a language model, with adapters if the batch has a memory.
        batch: the batch; its labels are predicted.
        chunk_size: number of tokens whose logits and gradients are computed together, to save memory with a large
            vocabulary; "auto" uses chunks if the host permits it, None computes all together.

    Raises:
        ConditionError: a chunk size with a trained head, or with logits that are not a scaled or capped linear function
            of the last hidden states.
        ConfigError: a chunk size below 1.
    """
    if chunk_size == "auto":
        chunk_size = AUTO_CHUNK if has_chunks(model) else None
    if chunk_size is not None:
        return chunked_nats(model, batch.kwargs(), batch.labels, chunk_size)
    logits = call_by_name(model, **batch.kwargs()).logits[:, :-1].float()
    labels = batch.labels[:, 1:]
    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return nats.view(labels.shape)


def mean_nats(model: nn.Module, batch: TextBatch, chunk_size: ChunkSize = "auto") -> Tensor:
    """Return the mean of `token_nats` over the tokens of the batch: the training loss."""
    return token_nats(model, batch, chunk_size).sum() / (batch.labels[:, 1:] != IGNORED).sum().clamp(min=1)


def sum_nats(model: nn.Module, batch: TextBatch, chunk_size: ChunkSize = "auto") -> tuple[Tensor, int | Tensor]:
    """Return the sum of `token_nats` over the tokens of the batch, and the number of these tokens.

    On a GPU the number is a tensor, because reading it would wait for the GPU.
    """
    count = (batch.labels[:, 1:] != IGNORED).sum()
    return token_nats(model, batch, chunk_size).sum(), int(count) if may_read(count) else count


def has_chunks(model: nn.Module) -> bool:
    """Return whether "auto" computes the loss of a language model in chunks, on any device."""
    # Where several processes share the weights of a head, only a call of the whole host gathers them.
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    shared = together and (shards(model) or tensor_parallel_size(model) > 1)
    if shared:
        return False
    try:
        output_head(model)
    except ConditionError:
        return False
    return True


def chunked_nats(
    model: nn.Module, kwargs: Mapping[str, object], labels: Tensor, chunk_size: int = AUTO_CHUNK
) -> Tensor:
    """`token_nats` of a call with these arguments, with the logits of so many tokens at once."""
    check_int("chunk_size", chunk_size)
    head = output_head(model)
    states = last_hidden_states(model, kwargs)[:, :-1]
    labels = labels[:, 1:].to(states.device)
    learned = labels != IGNORED
    if may_read(learned):
        nats: Tensor = ChunkedCrossEntropy.apply(states[learned], labels[learned], head, chunk_size)
        return torch.zeros(labels.shape, device=nats.device).masked_scatter(learned.to(nats.device), nats)
    # To gather the tokens that are learned would wait for the device, which is to count them: the others are 0.
    states = torch.where(learned[..., None], states, 0)
    nats = ChunkedCrossEntropy.apply(states.flatten(0, 1), labels.clamp(min=0).flatten(), head, chunk_size)
    return torch.where(learned.to(nats.device), nats.view(labels.shape), 0)


class ChunkedCrossEntropy(torch.autograd.Function):
    """-log p (t,) of tokens by the hidden states that predict them, with gradients for these alone.

    For z = s tanh(c (W h + b) / s) the logits of a hidden state h (d,), p = softmax(z) and y the next token,

        -log p_y = logsumexp(z) - z_y,    its gradient by h = c Wᵀ ((p - 1_y) (1 - (z / s)²)).

    Both are computed at once, chunk by chunk, so that the backward pass multiplies what is cached, d numbers a token,
    and computes no logits again. As in Liger (arXiv 2410.10989, section 3.2), with a frozen head.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, labels: Tensor, head: OutputHead, chunk_size: int) -> Tensor:
        """The loss of each token, and what the backward pass needs."""
        weight, learns = head.linear.weight, ctx.needs_input_grad[0]
        nats = torch.empty(len(states), device=weight.device)
        gradients = torch.empty_like(states) if learns else None
        for start in range(0, len(states), chunk_size):
            part = slice(start, start + chunk_size)
            logits, target = head.logits(states[part]), labels[part, None].to(weight.device)
            total = logits.logsumexp(-1, keepdim=True)
            nats[part] = (total - logits.gather(1, target))[:, 0]
            if gradients is None:
                continue
            slope = None if head.softcap is None else 1 - (logits / head.softcap).square_()
            # Of the logits, in the memory of the logits.
            logits.sub_(total).exp_().scatter_add_(1, target, torch.full_like(total, -1.0))
            if slope is not None:
                logits.mul_(slope)
            gradients[part] = (logits.to(weight.dtype) @ weight).mul_(head.scale)
        ctx.save_for_backward(gradients)
        return nats

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient by the hidden states (t, d)."""
        (gradients,) = ctx.saved_tensors
        return (gradient.to(gradients.device)[:, None] * gradients.float()).to(gradients.dtype), None, None, None


#: Names in configs of transformers of a softcap, of a factor of logits, and of a divisor of logits.
_SOFTCAPS = ("final_logit_softcapping", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)


@dataclass(frozen=True)
class OutputHead:
    """Logits z = s tanh(c (W h + b) / s) of last hidden states h; z = c (W h + b) without s."""

    linear: nn.Linear  # W (v, d) and b (v,), frozen
    scale: float = 1.0  # c
    softcap: float | None = None  # s, as in Gemma 2

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
