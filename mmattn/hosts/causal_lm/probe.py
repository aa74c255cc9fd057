"""Proof, before an adapter is put on a language model, that what it writes at its layers reaches the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.language_models import device_of, embeddings_of
from mmattn.errors import AttachError, ConditionError, MmattnError


class _Disturbance:
    """Changes one row of the hidden states that pass a layer.

    Args:
        row: which.
        width: d that the hidden states must have.
    """

    def __init__(self, row: int, width: int) -> None:
        self.row, self.width = row, width

    def change(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != self.width:
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise AttachError(
                f"adapters act on hidden states (b, l, {self.width}), and the layers of this host hand on {given} "
                "(hyper-connections, two streams, another width): no adapter can be put on it"
            )
        changed = x.clone()
        changed[self.row] += torch.linspace(-1, 1, x.shape[-1], device=x.device).to(x.dtype)
        return changed

    def after(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return self.change(output)
        return (self.change(output[0]), *output[1:])

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.change(kwargs.get("hidden_states"))}


@torch.no_grad()
def probe(host: nn.Module, layers: Sequence[tuple[int, nn.Module]], position: str, width: int) -> None:
    """Prove that what is written at each layer changes the host's answer.

    One forward of two tokens; row r is disturbed at the r-th layer only, row 0 nowhere.

    Args:
        host: the language model, without a memory.
        layers: number and module of each.
        position: "before" or "after" them.
        width: d of the hidden states.

    Raises:
        AttachError: the host cannot be called with token ids, gives no logits, hands on other states, or is reversible.
        ConditionError: a layer whose output does not matter.
    """
    if any(hasattr(layer, "backward_pass") for _, layer in layers):
        raise AttachError(
            f"the layers of {type(host).__name__} are reversible: the backward pass runs them again without what "
            "adapters added, and gradients would be wrong; no adapter can be put on it"
        )
    modes = [(module, module.training) for module in host.modules()]
    hooks = []
    ids = torch.ones(len(layers) + 1, 2, dtype=torch.long, device=device_of(embeddings_of(host)))
    try:
        for row, (_, layer) in enumerate(layers, 1):
            disturb = _Disturbance(row, width)
            if position == "before":
                hooks.append(layer.register_forward_pre_hook(disturb.before, with_kwargs=True))
            else:
                hooks.append(layer.register_forward_hook(disturb.after))
        for module, _ in modes:
            module.training = False
        logits = _logits(host, ids)
    finally:
        for module, mode in modes:
            module.training = mode
        for hook in hooks:
            hook.remove()
    blind = [layer for row, (layer, _) in enumerate(layers, 1) if torch.equal(logits[row], logits[0])]
    if blind:
        raise ConditionError(
            f"what is written {position} layers {blind} does not reach the answer of {type(host).__name__}: memory "
            "would be lost there; name the list of decoder layers with path=, or choose other layers"
        )


def _logits(host: nn.Module, ids: Tensor) -> Tensor:
    name = type(host).__name__
    try:
        out = host(input_ids=ids, attention_mask=torch.ones_like(ids))
    except MmattnError:
        raise
    except Exception as error:
        raise AttachError(
            f"{name} cannot be called with two token ids (input_ids, attention_mask) as a causal language model is: "
            f"{type(error).__name__}: {error}"
        ) from error
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:1] != ids.shape[:1]:
        raise AttachError(
            f"{name} gives no logits, so that nothing tells whether memory reaches its answer: attach to the model "
            "with its head (AutoModelForCausalLM)"
        )
    return logits
