"""LoRAs (arXiv 2106.09685) made by peft: beside an adapter, and as the text-only control of equal size."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from mmattn.errors import AdapterFileError, ConfigError, check_int, import_extra

if TYPE_CHECKING:
    from peft import PeftModel


def _ranks_for(sizes: dict[str, tuple[int, ...]], parameters: int) -> dict[str, int]:
    """Return LoRA ranks by name of linear layers of these sizes, with nearly so many parameters in all.

    All layers get the same rank; the rest goes to layers from the last to the first, one rank each.
    """
    check_int("parameters", parameters)
    costs = {name: sum(shape) for name, shape in sizes.items()}
    if not costs or min(costs.values()) > parameters:
        raise ConfigError(
            f"a LoRA of {parameters} parameters is smaller than one rank of the smallest of {len(costs)} linear layers "
            f"({min(costs.values(), default=0)} parameters): give the adapter more"
        )
    rank = parameters // sum(costs.values())
    ranks = {name: min(rank, *shape) for name, shape in sizes.items()}
    left = parameters - sum(ranks[name] * cost for name, cost in costs.items())
    while fitting := [name for name in reversed(costs) if costs[name] <= left and ranks[name] < min(sizes[name])]:
        for name in fitting:
            if costs[name] <= left:
                ranks[name] += 1
                left -= costs[name]
    return {name: rank for name, rank in ranks.items() if rank}


def _linear_sizes(host: nn.Module, layers: Sequence[int] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the two sides of each linear layer of a host, or of these host layers, head excepted, by name."""
    if hasattr(host, "adapters") and hasattr(host, "host"):
        raise ConfigError(f"this {type(host).__name__} has adapters, which peft would freeze: give its .host")
    if any(hasattr(module, "base_layer") for module in host.modules()):
        raise ConfigError(f"this {type(host).__name__} has a LoRA already: unload() it, or merge it")
    get_head: Callable[[], nn.Module] | None = getattr(host, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    sizes: dict[str, tuple[int, ...]] = {}
    for name, module in host.named_modules():
        weight = getattr(module, "weight", None)
        # GPT-2 keeps its linear layers as Conv1D, whose weight is transposed; the sum of its sides is the same.
        if module is head or weight is None or weight.dim() != 2:
            continue
        if isinstance(module, nn.Linear):
            sizes[name] = (module.out_features, module.in_features)  # not the weight's shape: 4-bit ones lie in a row
        elif type(module).__name__ == "Conv1D":
            sizes[name] = tuple(weight.shape)
    if layers is None:
        return sizes
    number_of = {name: next((int(part) for part in name.split(".") if part.isdigit()), None) for name in sizes}
    if missing := sorted(set(layers) - set(number_of.values())):
        raise ConfigError(f"layers={list(layers)}: {type(host).__name__} has no linear layers in {missing}")
    return {name: size for name, size in sizes.items() if number_of[name] in layers}


def matched_lora(host: nn.Module, parameters: int, *, layers: Sequence[int] | None = None) -> PeftModel:
    """Add a LoRA of a given number of parameters to a host: the control of equal size.

    Like every LoRA it starts as the identity. Only its parameters and those of adapters on the host are trained; peft
    freezes the host, and leaves it frozen.

    Args:
        host: a model with linear layers, and without layers of peft.
        parameters: number of trained parameters, within 5 %.
        layers: numbers of the host layers with LoRA, like peft's `layers_to_transform`; None for all.

    Returns:
        The peft model, to train and call like the host; its `unload()` returns the host.

    Raises:
        ConfigError: no ranks come within 5 %, no such layers, an adapted model instead of its host, or a host with a
            LoRA. The host is unchanged.
        MissingExtraError: peft is not installed.
    """
    sizes = _linear_sizes(host, layers)
    ranks = _ranks_for(sizes, parameters)
    trained = sum(rank * sum(sizes[name]) for name, rank in ranks.items())
    if abs(trained - parameters) > 0.05 * parameters:
        raise ConfigError(
            f"the nearest LoRA has {trained:,} parameters, more than 5 % off the {parameters:,} of the adapter: change "
            "the size of the adapter"
        )
    return _with_ranks(host, ranks)


def add_lora(host: nn.Module, rank: int, *, layers: Sequence[int] | None = None, dropout: float = 0.0) -> PeftModel:
    """Add a LoRA of the same rank to every linear layer of a host, except its head.

    Only its parameters and those of adapters on the host, attached before or after, are trained; peft freezes the host,
    and leaves it frozen.

    Args:
        host: a model with linear layers, and without layers of peft.
        rank: r of peft; less in layers narrower than r.
        layers: as in `matched_lora`.
        dropout: dropout probability of the inputs of the LoRA.

    Returns:
        The peft model, to which adapters can be attached.

    Raises:
        ConfigError: no such layers, an adapted model instead of its host, or a host with a LoRA.
        MissingExtraError: peft is not installed.
    """
    check_int("rank", rank)
    sizes = _linear_sizes(host, layers)
    if not sizes:
        raise ConfigError(f"{type(host).__name__} has no linear layers for a LoRA")
    return _with_ranks(host, {name: min(rank, *shape) for name, shape in sizes.items()}, dropout)


def load_lora(host: nn.Module, folder: str | os.PathLike[str]) -> PeftModel:
    """Load a LoRA that `save_pretrained` of a peft model wrote; it is frozen, as the host is."""
    peft = import_extra("peft", "train")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return peft.PeftModel.from_pretrained(host, os.fspath(folder))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise AdapterFileError(f"{os.fspath(folder)!r} holds no LoRA for {type(host).__name__}: {error}") from error


def _with_ranks(host: nn.Module, ranks: dict[str, int], dropout: float = 0.0) -> PeftModel:
    peft = import_extra("peft", "train")
    highest = max(ranks.values())
    config = peft.LoraConfig(
        r=highest,
        lora_alpha=2 * highest,
        lora_dropout=dropout,
        target_modules=list(ranks),
        # Whole names: peft takes a pattern for the end of a name, and "proj" would be "inner.proj", too.
        rank_pattern={f"^{re.escape(name)}": rank for name, rank in ranks.items()},
        alpha_pattern={f"^{re.escape(name)}": 2 * rank for name, rank in ranks.items()},
        fan_in_fan_out=any(type(host.get_submodule(name)).__name__ == "Conv1D" for name in ranks),
        task_type="CAUSAL_LM" if hasattr(host, "prepare_inputs_for_generation") else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in words that are going away
        return peft.get_peft_model(host, config)
