"""Changes of any module, one at a time: each way to change its weights, and each setting that it holds beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.computed import Change, Subject

Way = Callable[[nn.Module], AbstractContextManager[Any] | None]


def noise(like: Tensor, seed: int, size: float = 0.3) -> Tensor:
    """Return random numbers, the same for the same seed."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return numbers.to(like.dtype) * size


def _others(part: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Return each weight with other values for it."""
    return [(weight, weight.detach() + noise(weight, seed)) for seed, weight in enumerate(part.parameters())]


def _places(part: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [(one, name, p) for one in part.modules() for name, p in one._parameters.items() if p is not None]


def _for_each(write: Callable[[nn.Parameter, Tensor], object]) -> Way:
    def way(part: nn.Module) -> None:
        for weight, other in _others(part):
            write(weight, other)

    return way


def add(part: nn.Module) -> None:
    """Add to each weight in place."""
    for weight, other in _others(part):
        weight.add_(other - weight)


def _one_number(part: nn.Module) -> None:
    """Change one number of one matrix that makes keys."""
    named = [(name, weight) for name, weight in part.named_parameters() if weight.ndim > 1 and "norm" not in name]
    keys = [one for one in named if "k_proj" in one[0] or ".to_k" in one[0]] or named
    keys[0][1].view(-1)[3].add_(5.0)


def _load(assign: bool) -> Way:
    def way(part: nn.Module) -> None:
        state = {
            name: one.detach() + noise(one, seed) if one.is_floating_point() else one.clone()
            for seed, (name, one) in enumerate(part.state_dict().items())
        }
        part.load_state_dict(state, assign=assign)

    return way


def new_parameters(part: nn.Module) -> None:
    """Put other parameters in place of all."""
    for seed, (owner, name, old) in enumerate(_places(part)):
        setattr(owner, name, nn.Parameter(old.detach() + noise(old, seed), requires_grad=old.requires_grad))


def _swap(part: nn.Module) -> None:
    for seed, (_, _, old) in enumerate(_places(part)):
        new = nn.Parameter(old.detach() + noise(old, seed), requires_grad=old.requires_grad)
        torch.utils.swap_tensors(old, new)


def _foreach(part: nn.Module) -> None:
    weights = list(part.parameters())
    torch._foreach_add_(weights, [noise(weight, seed) for seed, weight in enumerate(weights)])


def optimizer(kind: type[torch.optim.Optimizer], **settings: Any) -> Way:
    """Return a way that takes one step of an optimizer."""

    def way(part: nn.Module) -> None:
        weights = list(part.parameters())
        stepping = kind(weights, **{"lr": 0.2} | settings)
        for seed, weight in enumerate(weights):
            weight.grad = noise(weight, seed, 1.0)
        stepping.step()
        stepping.zero_grad()

    return way


def _modules(part: nn.Module) -> None:
    """Put copies with other weights in place of all modules that have weights and no parts."""
    for owner in list(part.modules()):
        for name, child in list(owner._modules.items()):
            if child is not None and not child._modules and child._parameters:
                add(new := copy.deepcopy(child))
                setattr(owner, name, new)


def _parametrized(part: nn.Module) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    for one in list(part.modules()):
        if isinstance(one, nn.Linear):
            parametrize.register_parametrization(one, "weight", Twice())


@contextmanager
def _functional(part: nn.Module) -> Iterator[None]:
    names = [name for name, _ in part.named_parameters()]
    weights = {name: other for name, (_, other) in zip(names, _others(part), strict=True)}
    with nn.utils.stateless._reparametrize_module(part, weights):
        yield


def half_and_back(part: nn.Module) -> None:
    """Round to bfloat16 and go back."""
    part.to(torch.bfloat16).to(torch.float32)


#: Every way to change weights.
WAYS: dict[str, Way] = {
    "add_": add,
    "copy_": _for_each(lambda weight, other: weight.copy_(other)),
    "one number": _one_number,
    "load_state_dict": _load(False),
    "load_state_dict(assign)": _load(True),
    "new Parameters": new_parameters,
    "weight.data =": _for_each(lambda weight, other: setattr(weight, "data", other)),
    "swap_tensors": _swap,
    "set_": _for_each(lambda weight, other: weight.set_(other)),
    "_foreach_add_": _foreach,
    "modules replaced": _modules,
    "functional_call": _functional,
    "SGD fused": optimizer(torch.optim.SGD, fused=True),
    "SGD fused, momentum": optimizer(torch.optim.SGD, fused=True, momentum=0.9),
    "Adam fused": optimizer(torch.optim.Adam, fused=True),
    "AdamW fused": optimizer(torch.optim.AdamW, fused=True),
    "AdamW foreach": optimizer(torch.optim.AdamW, foreach=True),
    "AdamW loop": optimizer(torch.optim.AdamW, foreach=False),
    "Adagrad fused": optimizer(torch.optim.Adagrad, fused=True),
    "RMSprop": optimizer(torch.optim.RMSprop),
}
#: What writes past torch's count of versions: noticed, or said on the page of the cache.
UNCOUNTED: dict[str, Way] = {
    "data.copy_": _for_each(lambda weight, other: weight.data.copy_(other)),
    "numpy": _for_each(lambda weight, other: weight.detach().numpy().__setitem__(..., other.numpy())),
}
PARAMETRIZED: dict[str, Way] = {"parametrized": _parametrized}


# Settings of modules, and of a config ---------------------------------------------------------------------------------

#: Fields of a config that name, count or allocate.
_NO_SETTING = {
    *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "torch_dtype", "dtype"),
    *("transformers_version", "model_type", "architectures", "use_cache", "return_dict", "output_hidden_states"),
    *("output_attentions", "output_router_logits", "is_encoder_decoder", "problem_type", "id2label", "label2id"),
    *("chunk_size_feed_forward", "tie_word_embeddings", "is_decoder", "add_cross_attention", "num_hidden_layers"),
    *("n_layer", "num_layers", "use_bidirectional_attention"),
}
#: What modules hold that names, counts or splits: another value breaks the module, or its promise to be causal.
_NO_NUMBER = {
    *("training", "config", "layer_idx", "layer_index", "is_causal", "head_size", "head_dim", "num_heads"),
    *("gradient_checkpointing", "max_seq_len_cached", "in_features", "out_features", "num_embeddings", "nx", "nf"),
    *("embedding_dim", "padding_idx", "in_channels", "out_channels", "groups", "output_size", "attention_head_size"),
    *("is_cross_attention", "num_key_value_groups", "hidden_size", "rotary_ndims"),
}
_ACTIVATIONS = {"silu": "gelu", "gelu": "relu", "gelu_new": "relu", "gelu_pytorch_tanh": "relu", "relu": "gelu"}
_LAYER_TYPES = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
_ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
]


def _variants(value: Any) -> list[Any]:
    """Return other values of a setting."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, max(1, value // 2)]
    if isinstance(value, float):
        return [0.02 if value < 1e-2 else value * 0.5]
    if isinstance(value, str):
        return [_ACTIVATIONS[value]] if value in _ACTIVATIONS else []
    if isinstance(value, dict):
        changed = [{**value, key: one} for key, inner in value.items() for one in _variants(inner)]
        return changed + [value | rope for rope in _ROPES if value.get("rope_type") == "default"]
    if isinstance(value, (list, tuple)) and value and set(value) <= set(_LAYER_TYPES):
        return [[_LAYER_TYPES[one] for one in value]]
    return []


def config_changes(config: Any) -> list[dict[str, Any]]:
    """Return other settings, one at a time, for a model of equal weights."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _NO_SETTING and name[0] != "_"}
    return [{name: one} for name, value in fields.items() for one in _variants(value)]


def setting_changes(root: nn.Module) -> list[Change]:
    """Return changes of each number, switch, activation and buffer of a host, and of each field of its config."""
    found: dict[str, Change] = {}

    def note(what: str, kind: type, change: Callable[[Any], object]) -> None:
        def apply(subject: Subject) -> None:
            for one in subject.host.modules():
                if type(one) is kind:
                    change(one)

        name = f"{kind.__name__}.{what}"
        found.setdefault(name, Change(name, apply))

    for module in root.modules():
        kind = type(module)
        for name, value in vars(module).items():
            if name[0] != "_" and name not in _NO_NUMBER and isinstance(value, (bool, int, float)):
                for one in _variants(value):
                    note(f"{name} = {one:.4g}", kind, lambda part, name=name, one=one: setattr(part, name, one))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                note(f"{name}.mul_", kind, lambda part, name=name: getattr(part, name).mul_(0.7))
                note(f"{name} = …", kind, lambda part, name=name: setattr(part, name, getattr(part, name) * 0.7))
        for name, child in module._modules.items():
            if child is not None and not (child._modules or child._parameters or child._buffers):
                note(f"{name} = Softsign()", kind, lambda part, name=name: setattr(part, name, nn.Softsign()))
    for setting in config_changes(root.config) if hasattr(root, "config") else []:
        ((name, value),) = setting.items()
        label = f"config.{name} = {value}"
        found[label] = Change(label, lambda one, name=name, value=value: setattr(one.host.config, name, value))
    return list(found.values())
