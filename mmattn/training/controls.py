"""The control every claim stands beside: a text-only LoRA (arXiv 2106.09685) with as many trained parameters."""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import nn

from mmattn.errors import ConfigError, check_int, import_extra


def ranks_for(host: nn.Module, parameters: int) -> dict[str, int]:
    """A LoRA rank for each linear layer of a host, head excepted, that add up to nearly `parameters` weights.

    All layers get the same rank; what is left over goes to layers from the last to the first, one rank each. With fewer
    parameters than one rank everywhere, some layers get none.

    Raises:
        ConfigError: not even one layer's rank of 1 is as small as that.
    """
    check_int("parameters", parameters)
    get_head: Any = getattr(host, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    costs: dict[str, int] = {}
    limits: dict[str, int] = {}
    for name, module in host.named_modules():
        weight = getattr(module, "weight", None)
        # GPT-2 keeps its linear layers as Conv1D, whose weight is transposed; the sum of its sides is the same.
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if linear and module is not head and weight is not None and weight.dim() == 2:
            costs[name], limits[name] = sum(weight.shape), min(weight.shape)
    if not costs or min(costs.values()) > parameters:
        raise ConfigError(
            f"a LoRA of {parameters} parameters is smaller than one rank of the smallest of {len(costs)} linear layers "
            f"({min(costs.values(), default=0)} parameters): give the adapter more"
        )
    rank = parameters // sum(costs.values())
    ranks = {name: min(rank, limits[name]) for name in costs}
    left = parameters - sum(ranks[name] * costs[name] for name in costs)
    while fitting := [name for name in reversed(costs) if costs[name] <= left and ranks[name] < limits[name]]:
        for name in fitting:
            if costs[name] <= left:
                ranks[name] += 1
                left -= costs[name]
    return {name: rank for name, rank in ranks.items() if rank}


def matched_lora(host: nn.Module, parameters: int, *, dropout: float = 0.0) -> Any:
    """Put a LoRA with as many trained parameters as `parameters` on a host; returns the peft model.

    It is trained and called like the host; `unload()` gives the host back. As every LoRA it starts as nothing.

    Raises:
        ConfigError: as `ranks_for`, or the ranks cannot come within 5 %. MissingExtraError: peft is not installed.
    """
    peft = import_extra("peft", "train")
    ranks = ranks_for(host, parameters)
    highest = max(ranks.values())
    config = peft.LoraConfig(
        r=highest,
        lora_alpha=2 * highest,
        lora_dropout=dropout,
        target_modules=list(ranks),
        rank_pattern={re.escape(name): rank for name, rank in ranks.items()},
        alpha_pattern={re.escape(name): 2 * rank for name, rank in ranks.items()},
        fan_in_fan_out=any(type(host.get_submodule(name)).__name__ == "Conv1D" for name in ranks),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in words that are going away
        model = peft.get_peft_model(host, config)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if abs(trained - parameters) > 0.05 * parameters:
        model.unload()
        raise ConfigError(
            f"a LoRA of {trained:,} parameters is the nearest to the {parameters:,} of the adapter on this host: "
            "further than 5 %, so the comparison would not be fair; change the size of the adapter"
        )
    return model
