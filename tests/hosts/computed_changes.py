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
from peft.utils.hotswap import hotswap_adapter_from_state_dict
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


def _hotswap(size: float) -> Callable[[Subject], None]:
    def apply(subject: Subject) -> None:
        state = {n: w for n, w in subject.peft.state_dict().items() if "lora_" in n and ".default" in n}
        state = {name: weight + _noise(weight, i, size) for i, (name, weight) in enumerate(state.items())}
        hotswap_adapter_from_state_dict(subject.peft, state, "default", lora_config(lora_alpha=20))

    return apply


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
    "hotswap": (_hotswap(0.3), False),
    "hotswap, another alpha": (_hotswap(0.0), False),
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
    Change("host: half and back", _of_host(_there_and_back), "attached"),
    *[Change(f"LoRA: {name}", way, "lora", equal) for name, (way, equal) in LORA.items()],
    *[Change(f"call: {name}", way, "call", equal) for name, (way, equal) in CALLS.items()],
]


# The config, and what modules hold beside weights --------------------------------------------------------------------

#: Fields of a config that name, count or allocate; and those of a part that no tiny host has.
_NOT = {
    *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "torch_dtype", "dtype", "transformers_version"),
    *("model_type", "architectures", "use_cache", "return_dict", "output_hidden_states", "output_attentions"),
    *("is_encoder_decoder", "problem_type", "id2label", "label2id", "chunk_size_feed_forward", "tie_word_embeddings"),
    *("is_decoder", "add_cross_attention", "num_hidden_layers", "n_layer", "num_layers", "output_router_logits"),
}
_WORDS = {"silu": "gelu", "gelu": "relu", "gelu_new": "relu", "gelu_pytorch_tanh": "relu", "relu": "gelu"}


def variants(value: Any) -> list[Any]:
    """Return other values of a setting."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, max(1, value // 2)]
    if isinstance(value, float):
        return [value * 3 + 1e-3 if value < 1e-2 else value * 0.5]
    if isinstance(value, str):
        return [_WORDS[value]] if value in _WORDS else []
    if isinstance(value, dict):
        changed = [{**value, key: one} for key, inner in value.items() for one in variants(inner)]
        if "rope_type" in value and value["rope_type"] == "default":
            changed.append({**value, "rope_type": "linear", "factor": 2.0})
            changed.append({**value, "rope_type": "dynamic", "factor": 2.0})
            changed.append({**value, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16})
        return changed
    if isinstance(value, (list, tuple)) and set(value) == {"full_attention", "sliding_attention"}:
        swap = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
        return [[swap[one] for one in value]]
    if value is None:
        return []
    return []


def config_changes(config: Any) -> list[tuple[str, Any]]:
    """Return other values for each field of a config."""
    fields = [(name, value) for name, value in config.to_dict().items() if name not in _NOT and name[0] != "_"]
    changes = [(name, one) for name, value in fields for one in variants(value)]
    return [*changes, ("attn_logit_softcapping", 5.0), ("sliding_window", 5)]


def module_changes(host: nn.Module) -> list[tuple[str, Change]]:
    """Return changes of what modules of one class hold: numbers, switches, activations and buffers."""
    found: dict[str, Change] = {}
    for module in host.modules():
        kind = type(module)
        for name, value in vars(module).items():
            if name[0] == "_" or name in ("training", "config") or not isinstance(value, (bool, int, float)):
                continue
            for one in variants(value):
                label = f"{kind.__name__}.{name} = {one!r}"
                found.setdefault(label, Change(label, _attribute(kind, name, one), "host"))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                label = f"{kind.__name__}.{name} in place"
                found.setdefault(label, Change(label, _buffer(kind, name, True), "host"))
                label = f"{kind.__name__}.{name} replaced"
                found.setdefault(label, Change(label, _buffer(kind, name, False), "host"))
        for name, child in module._modules.items():
            if child is not None and not list(child.parameters()) and not list(child.children()) and not list(child.buffers()):
                label = f"{kind.__name__}.{name} another activation"
                found.setdefault(label, Change(label, _activation(kind, name), "host"))
    for name, value in config_changes(host.config):
        label = f"config.{name} = {value!r}"
        found.setdefault(label, Change(label, _config(name, value), "host"))
    return list(found.values())


def _attribute(kind: type, name: str, value: Any) -> Callable[[Subject], None]:
    def apply(subject: Subject) -> None:
        for module in subject.host.modules():
            if type(module) is kind:
                setattr(module, name, value)

    return apply


def _config(name: str, value: Any) -> Callable[[Subject], None]:
    return lambda subject: setattr(subject.host.config, name, value)


def _buffer(kind: type, name: str, in_place: bool) -> Callable[[Subject], None]:
    def apply(subject: Subject) -> None:
        for module in subject.host.modules():
            if type(module) is kind and getattr(module, name, None) is not None:
                if in_place:
                    getattr(module, name).mul_(0.7)
                else:
                    setattr(module, name, getattr(module, name) * 0.7)

    return apply


def _activation(kind: type, name: str) -> Callable[[Subject], None]:
    def apply(subject: Subject) -> None:
        for module in subject.host.modules():
            if type(module) is kind:
                setattr(module, name, nn.Softsign())

    return apply
