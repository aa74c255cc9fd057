"""Changes of an adapted host, one at a time: of weights, of a LoRA, of the config, of what a call is made under."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tests.hosts.computed_caches import Subject, fill_lora, lora_config

Undo = AbstractContextManager[Any]


@dataclass(frozen=True)
class Change:
    """A change.

    Attributes:
        name: of the case.
        apply: makes it; a context manager makes it for a while.
        of: "adapter", "host", "lora", "config" (all of the host, before it is attached to in the twin), or "model".
        is_equal: it is not meant to change an answer.
    """

    name: str
    apply: Callable[[Subject], Undo | None]
    of: str
    is_equal: bool = False
    tolerance: float = 1e-5


def _noise(like: Tensor, seed: int, size: float = 0.3) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype) * size


def _new(weights: Any) -> list[tuple[Any, Tensor]]:
    return [(w, w.detach() + _noise(w, i)) for i, w in enumerate(weights)]


# Weights -------------------------------------------------------------------------------------------------------------


def _add(part: nn.Module) -> None:
    for weight, new in _new(part.parameters()):
        weight.add_(new - weight)


def _copy(part: nn.Module) -> None:
    for weight, new in _new(part.parameters()):
        weight.copy_(new)


def _one(part: nn.Module) -> None:
    """Change one matrix of keys only, at one place."""
    name, weight = _a_key_weight(part)
    weight.view(-1)[3].add_(5.0)


def _a_key_weight(part: nn.Module) -> tuple[str, Tensor]:
    named = [(n, p) for n, p in part.named_parameters() if p.ndim > 1 and "norm" not in n]
    keys = [one for one in named if "k_proj" in one[0] or "v_proj" in one[0] or ".to_k" in one[0]]
    return (keys or named)[0]


def _state(part: nn.Module) -> dict[str, Tensor]:
    state = {}
    for i, (name, w) in enumerate(part.state_dict().items()):
        state[name] = w.detach() + _noise(w, i) if w.is_floating_point() else w.clone()
    return state


def _load(assign: bool) -> Callable[[nn.Module], None]:
    def load(part: nn.Module) -> None:
        part.load_state_dict(_state(part), assign=assign)

    return load


def _parameters(part: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [(m, n, p) for m in part.modules() for n, p in m._parameters.items() if p is not None]


def _replace(part: nn.Module) -> None:
    for i, (owner, name, old) in enumerate(_parameters(part)):
        setattr(owner, name, nn.Parameter(old.detach() + _noise(old, i), requires_grad=old.requires_grad))


def _data(part: nn.Module) -> None:
    for weight, new in _new(part.parameters()):
        weight.data = new


def _swap(part: nn.Module) -> None:
    for i, (_, _, old) in enumerate(_parameters(part)):
        torch.utils.swap_tensors(old, nn.Parameter(old.detach() + _noise(old, i), requires_grad=old.requires_grad))


def _set(part: nn.Module) -> None:
    for weight, new in _new(part.parameters()):
        weight.set_(new)


def _foreach(part: nn.Module) -> None:
    weights = list(part.parameters())
    torch._foreach_add_(weights, [_noise(w, i) for i, w in enumerate(weights)])


def _through_data(part: nn.Module) -> None:
    for weight, new in _new(part.parameters()):
        weight.data.copy_(new)


def _numpy(part: nn.Module) -> None:
    for weight, new in _new(part.parameters()):
        weight.detach().numpy()[...] = new.numpy()


def _optimizer(kind: type[torch.optim.Optimizer], **settings: Any) -> Callable[[nn.Module], None]:
    def step(part: nn.Module) -> None:
        weights = list(part.parameters())
        optimizer = kind(weights, **{"lr": 0.2} | settings)
        for i, weight in enumerate(weights):
            weight.grad = _noise(weight, i, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _module(part: nn.Module) -> None:
    """Replace modules that have weights by copies with others."""
    for owner in list(part.modules()):
        for name, child in list(owner._modules.items()):
            if child is not None and not child._modules and child._parameters:
                new = copy.deepcopy(child)
                _add(new)
                owner._modules[name] = new


def _parametrize(part: nn.Module) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    name, _ = _a_key_weight(part)
    nn.utils.parametrize.register_parametrization(part.get_submodule(name.rpartition(".")[0]), "weight", Twice())


@contextmanager
def _functional(part: nn.Module) -> Iterator[None]:
    with nn.utils.stateless._reparametrize_module(part, {n: new for n, (_, new) in zip(
        dict(part.named_parameters()), _new(part.parameters()), strict=True)}):
        yield


@contextmanager
def _and_back(part: nn.Module, there: Callable[[], Any], back: Callable[[], Any]) -> Iterator[None]:
    there()
    yield
    back()


def _dtype(dtype: torch.dtype) -> Callable[[nn.Module], None]:
    return lambda part: part.to(dtype)


def _there_and_back(part: nn.Module) -> None:
    """Round to half precision and go back: the weights are others."""
    part.to(torch.float16).to(torch.float32)


WAYS: dict[str, Callable[[nn.Module], Undo | None]] = {
    "add_": _add,
    "copy_": _copy,
    "one number": _one,
    "load_state_dict": _load(False),
    "load_state_dict(assign)": _load(True),
    "new Parameters": _replace,
    "weight.data =": _data,
    "swap_tensors": _swap,
    "set_": _set,
    "_foreach_add_": _foreach,
    "modules replaced": _module,
    "functional_call": _functional,
    "parametrized": _parametrize,
    "half and back": _there_and_back,
    **{
        f"{kind.__name__} {name}": _optimizer(kind, **how)
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
        for name, how in {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}.items()
    },
    "RMSprop": _optimizer(torch.optim.RMSprop),
    "SGD fused, momentum": _optimizer(torch.optim.SGD, fused=True, momentum=0.9),
}
#: What writes past torch's count of versions: said on the pages of the caches.
ANNOUNCED = {"data.copy_": _through_data, "numpy": _numpy}


def _of_host(way: Callable[[nn.Module], Undo | None]) -> Callable[[Subject], Undo | None]:
    return lambda subject: way(subject.host)


def _of_adapter(way: Callable[[nn.Module], Undo | None]) -> Callable[[Subject], Undo | None]:
    return lambda subject: way(subject.model.adapters)


# LoRA ----------------------------------------------------------------------------------------------------------------


def lora_layers(subject: Subject) -> list[Any]:
    return [part for part in subject.host.modules() if isinstance(part, LoraLayer)]


def _each(do: Callable[[Any], Any]) -> Callable[[Subject], None]:
    def apply(subject: Subject) -> None:
        for layer in lora_layers(subject):
            do(layer)

    return apply


def _scaling(layer: Any) -> None:
    layer.scaling["default"] = 0.5


def _lora_weights(subject: Subject) -> nn.Module:
    return nn.ModuleList([layer.lora_B["default"] for layer in lora_layers(subject)])


def _add_third(subject: Subject) -> None:
    subject.peft.add_adapter("third", lora_config(r=3))
    fill_lora(subject.host, 17)
    subject.peft.set_adapter("third")
    subject.host.requires_grad_(False)


def _add_idle(subject: Subject) -> None:
    subject.peft.add_adapter("third", lora_config(r=3))
    subject.host.requires_grad_(False)


def _activate(*names: str) -> Callable[[Subject], None]:
    def apply(subject: Subject) -> None:
        subject.peft.base_model.set_adapter(list(names))
        subject.host.requires_grad_(False)

    return apply


def _delete(subject: Subject) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject.peft.delete_adapter("default")
    subject.host.requires_grad_(False)


def _weighted(subject: Subject) -> None:
    subject.peft.add_weighted_adapter(["default", "second"], [0.7, -0.4], "both", combination_type="linear")
    subject.peft.set_adapter("both")
    subject.host.requires_grad_(False)


def _hotswap(subject: Subject) -> None:
    from peft.utils.hotswap import hotswap_adapter_from_state_dict

    state = {
        name.replace(".default", ""): w + _noise(w, i)
        for i, (name, w) in enumerate(subject.host.state_dict().items())
        if "lora_" in name and ".default" in name
    }
    state = {f"base_model.model.{name}": w for name, w in state.items()}
    hotswap_adapter_from_state_dict(subject.peft, state, "default", lora_config(lora_alpha=20))


@contextmanager
def _disabled(subject: Subject) -> Iterator[None]:
    with subject.peft.disable_adapter():
        yield


@contextmanager
def _merged(subject: Subject) -> Iterator[None]:
    subject.peft.merge_adapter()
    yield
    subject.peft.unmerge_adapter()


@contextmanager
def _set_scale(subject: Subject) -> Iterator[None]:
    for layer in lora_layers(subject):
        layer.set_scale("default", 0.3)
    yield
    for layer in lora_layers(subject):
        layer.set_scale("default", 1.0)


@contextmanager
def _scaled(subject: Subject) -> Iterator[None]:
    for layer in lora_layers(subject):
        layer.scale_layer(0.3)
    yield
    for layer in lora_layers(subject):
        layer.unscale_layer()


LORA: dict[str, tuple[Callable[[Subject], Undo | None], bool]] = {
    "disable_adapter": (_disabled, False),
    "set_adapter": (_activate("second"), False),
    "two active": (_activate("default", "second"), False),
    "deleted": (_delete, False),
    "added and active": (_add_third, False),
    "added, idle": (_add_idle, True),
    "weighted sum": (_weighted, False),
    "merged": (_merged, True),
    "unloaded": (lambda s: s.peft.unload() and None, False),
    "merged and unloaded": (lambda s: s.peft.merge_and_unload() and None, True),
    "rescale_adapter_scale": (lambda s: rescale_adapter_scale(s.peft, 0.3), False),
    "set_scale": (_set_scale, False),
    "scale_layer": (_scaled, False),
    "scaling[...] =": (_each(_scaling), False),
    "hotswap": (_hotswap, False),
    "its weights, add_": (lambda s: _add(_lora_weights(s)), False),
    "its weights, fused": (lambda s: _optimizer(torch.optim.AdamW, fused=True)(_lora_weights(s)), False),
    "its weights, new": (lambda s: _replace(_lora_weights(s)), False),
}


# What a call is made under -------------------------------------------------------------------------------------------


@contextmanager
def _default_dtype(_: Subject) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _adapters_of_model(subject: Subject) -> str:
    (name,) = subject.model.adapters
    return str(name)


def _train(subject: Subject) -> None:
    subject.model.train()


CALLS: dict[str, tuple[Callable[[Subject], Undo | None], bool]] = {
    "autocast bfloat16": (lambda _: torch.autocast("cpu", torch.bfloat16), False),
    "autocast float16": (lambda _: torch.autocast("cpu", torch.float16), False),
    "default dtype": (_default_dtype, True),
    "inference mode": (lambda _: torch.inference_mode(), True),
    "disable_adapter of mmattn": (lambda s: s.model.disable_adapter(), False),
    "set_adapter([])": (lambda s: s.model.set_adapter([]), False),
    "train()": (_train, True),
}

CHANGES = [
    *[Change(f"adapter: {name}", _of_adapter(way), "adapter") for name, way in WAYS.items()],
    *[Change(f"host: {name}", _of_host(way), "host") for name, way in WAYS.items()],
    *[Change(f"LoRA: {name}", way, "lora", equal) for name, (way, equal) in LORA.items()],
    *[Change(f"call: {name}", way, "call", equal) for name, (way, equal) in CALLS.items()],
]
