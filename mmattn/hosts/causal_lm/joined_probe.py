"""Proof, before slots are joined with a host's own keys and values, that they reach its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.protocols import Site
from mmattn.errors import ConditionError
from mmattn.hosts.attention_hooks import attention_hooks, check_function
from mmattn.hosts.eval_mode import in_eval_mode
from mmattn.hosts.probe import answer_to
from mmattn.hosts.probe_inputs import text_inputs


@torch.no_grad()
def probe_joined(model: Any, sites: Sequence[Site]) -> None:
    """Prove that what is joined in each layer changes the host's answer.

    One forward; row r sees a slot in the r-th layer only, row 0 and the last nowhere.

    Args:
        model: the adapted model.
        sites: the attention of each layer.

    Raises:
        AttachError: the host cannot be called.
        ConditionError: a layer whose attention does not matter, or a host whose attention takes no mask.
    """
    host, rows = model.host, len(sites) + 2
    modules = [host.get_submodule(site.module) for site in sites]
    for module in modules:
        config: Any = module.config
        check_function(getattr(config, "own", config))
    listeners = {module: _slot_for(row) for row, module in enumerate(modules, 1)}
    with model.open_blocks.conditioned(None), in_eval_mode(host), attention_hooks(listeners):
        answer = answer_to(host, text_inputs(host, rows), rows, ("logits",))
    blind = [site.layer for row, site in enumerate(sites, 1) if torch.equal(answer[row], answer[0])]
    if blind:
        raise ConditionError(
            f"what is joined in the attention of layers {blind} does not reach the answer of {type(host).__name__}: "
            "memory would be lost there; choose other layers"
        )


def _slot_for(row: int) -> Callable[[HostAttention], HostAttention]:
    def join(x: HostAttention) -> HostAttention:
        ramp = torch.linspace(-1, 1, x.value.shape[3], device=x.value.device)
        value = ramp.expand(1, x.value.shape[1], 1, -1)
        key = torch.zeros(1, x.key.shape[1], 1, x.key.shape[3], device=x.key.device)
        sees = torch.arange(x.query.shape[0], device=x.query.device)[:, None] == row
        return x.join(key, value, None, sees)

    return join
