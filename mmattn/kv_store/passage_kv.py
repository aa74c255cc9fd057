"""A host reads passages: its keys and values of each, as if the passage were all there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.joined.joint_softmax import Capture, JoinedView
from mmattn.adapters.language_models import device_of, embeddings_of
from mmattn.hosts.causal_lm.continuous_batching import paused
from mmattn.hosts.causal_lm.generation import fewest_logits
from mmattn.hosts.context import Call
from mmattn.hosts.eval_mode import in_eval_mode
from mmattn.kv_store.passage_files import Entry


def read(model: Any, name: str, passages: Sequence[tuple[int, ...]]) -> list[Entry]:
    """Keys and values of some passages, which are read in one batch.

    Args:
        model: the adapted model.
        name: of its passage adapter.
        passages: ids of each.
    """
    longest = max(map(len, passages))
    padded = torch.tensor([[*one, *[one[-1]] * (longest - len(one))] for one in passages])
    real = torch.arange(longest) < torch.tensor([[len(one)] for one in passages])
    captured = capture(model, name, padded, real, torch.arange(longest)[None])
    has_windows = any(window is not None for window in captured.windows.values())

    def of_row(row: int, slots: dict[int, Tensor]) -> dict[int, Tensor]:
        length = len(passages[row])
        return {layer: one[row, :, :length].transpose(0, 1).contiguous() for layer, one in slots.items()}

    return [
        Entry(ids, of_row(row, captured.keys), of_row(row, captured.values), has_windows)
        for row, ids in enumerate(passages)
    ]


@torch.no_grad()
def capture(
    model: Any, name: str, ids: Tensor, real: Tensor, positions: Tensor, joined: JoinedView | None = None
) -> Capture:
    """What the attention of every layer is given of a text, in eval mode.

    Args:
        model: the adapted model.
        name: of its passage adapter.
        ids: (b, l).
        real: (b, l) bool, which of them are tokens; padding is on the right.
        positions: (b or 1, l), of the tokens.
        joined: what the text sees besides.
    """
    host, captured = model.host, Capture(joined)
    device = device_of(embeddings_of(host))
    with (
        in_eval_mode(host),
        torch.inference_mode(False),
        torch.no_grad(),
        paused(model),
        model.open_blocks.conditioned(Call({name: captured}, reads_memory=True)),
    ):
        host(
            input_ids=ids.to(device),
            attention_mask=real.long().to(device),
            position_ids=positions.expand(len(ids), -1).to(device),
            use_cache=False,
            **fewest_logits(host),
        )
    return captured
