"""`PassageSelection`: passages put one after the other before the text of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmattn.adapters.joined_slots import Capture, JoinedSlots, JoinedView
from mmattn.adapters.language_models import device_of, embeddings_of
from mmattn.adapters.passages import PassageLayers, Passages
from mmattn.adapters.protocols import Site
from mmattn.errors import ConditionError
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.causal_lm.continuous_batching import paused
from mmattn.hosts.causal_lm.generation import fewest_logits
from mmattn.hosts.context import Call
from mmattn.hosts.probe import in_eval_mode

#: Ids of a passage, by which it is known.
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Passage:
    """Ids of a passage, and its keys (m, g, k) and values (m, g, v) by layer, as at positions from `start` on.

    `has_windows`: some layers attend to a limited number of tokens before.
    """

    ids: Ids
    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    has_windows: bool = False
    start: int = 0

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(one.nbytes for part in (self.keys, self.values) for one in part.values())


class PassageReader(Protocol):
    """The cache of the passages of a selection."""

    model: AdaptedModel
    name: str

    def check(self, adapter: PassageLayers) -> None:
        """Raise ConditionError if another host or other weights than those of an adapter read the passages."""

    def passages(self, rows: Sequence[Sequence[Ids]]) -> list[list[Passage]]:
        """Return the passages of each row, behind the prefix."""


class PassageSelection(Passages):
    """Passages of a `PassageCache` before the texts of a call, given to it as `memory=`; made by its `select`.

    Keys and values are put together at the first call, and used by all later ones.

    Args:
        cache: the `PassageCache`.
        rows: for each row of text the ids of its passages, in their order.
        recomputed_tokens: as in `PassageCache.select`.
    """

    def __init__(self, cache: PassageReader, rows: Sequence[Sequence[Ids]], recomputed_tokens: int = 0) -> None:
        self.cache, self.rows, self.recomputed_tokens = cache, [list(row) for row in rows], recomputed_tokens
        self._slots: JoinedSlots | None = None

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: int | slice | list[int]) -> PassageSelection:
        """Return some rows, by number, slice or list."""
        numbers = torch.arange(len(self.rows))[rows].reshape(-1).tolist()
        chosen = [self.rows[number] for number in numbers]
        return PassageSelection(self.cache, chosen, self.recomputed_tokens)

    def nbytes(self) -> int:
        """Bytes of keys and values, once they were put together."""
        return 0 if self._slots is None else self._slots.nbytes()

    def slots(self, adapter: PassageLayers) -> JoinedSlots:
        """Return keys and values of every layer; ConditionError if another host or other weights computed them."""
        self.cache.check(adapter)
        if self._slots is None:
            with torch.inference_mode(False), torch.no_grad():
                self._slots = self._concatenate(adapter, self.cache.passages(self.rows))
        return self._slots

    def _concatenate(self, adapter: PassageLayers, rows: Sequence[Sequence[Passage]]) -> JoinedSlots:
        moved = adapter.rotations is not None
        starts = [_starts(row) if moved else [passage.start for passage in row] for row in rows]
        positions = [
            torch.cat(
                [
                    _EMPTY,
                    *(start + torch.arange(len(one.ids), device="cpu") for start, one in zip(begin, row, strict=True)),
                ]
            )
            for begin, row in zip(starts, rows, strict=True)
        ]
        lengths = torch.tensor([len(one) for one in positions])
        slots = JoinedSlots(
            {site.layer: _keys(adapter, site, rows, starts) for site in adapter.sites},
            {site.layer: _values(site, rows) for site in adapter.sites},
            torch.arange(int(lengths.max())) < lengths[:, None],
            pad_sequence(positions, batch_first=True),
            torch.tensor([int(one.max()) + 1 if len(one) else 0 for one in positions]),
        )
        return self._recomputed(adapter, rows, slots) if self.recomputed_tokens else slots

    def _recomputed(self, adapter: PassageLayers, rows: Sequence[Sequence[Passage]], slots: JoinedSlots) -> JoinedSlots:
        """Return the slots after the host has read the first tokens of passages again at their positions."""
        windows = any(passage.has_windows for row in rows for passage in row)
        if adapter.rotations is None or windows:
            why = "whose layers see back over a window" if windows else "with learned positions"
            raise ConditionError(
                f"recomputed_tokens={self.recomputed_tokens} reads first tokens of passages again where they stand, "
                f"which is not done in a host {why}: leave it out"
            )
        again = [_first_tokens(row, self.recomputed_tokens) for row in rows]
        if not any(again):
            return slots
        assert slots.positions is not None and slots.offsets is not None
        tokens, real, padded = _tokens_again(rows, again)
        positions = slots.positions.gather(1, padded) if slots.positions.shape[1] else padded
        unread = slots.mask.clone()
        for number, row in enumerate(again):
            unread[number, row] = False
        before = slots.positions[:, None] < positions[..., None]
        visible = JoinedSlots(slots.keys, slots.values, unread, slots.positions, torch.zeros_like(slots.offsets))
        captured = capture(self.cache.model, self.cache.name, tokens, real, positions, JoinedView(visible, before))
        for layer in adapter.layers:
            for number, row in enumerate(again):
                slots.keys[layer][number, :, row] = captured.keys[layer][number, :, : len(row)]
                slots.values[layer][number, :, row] = captured.values[layer][number, :, : len(row)]
        return slots


_EMPTY = torch.zeros(0, dtype=torch.long, device="cpu")


def _starts(row: Sequence[Passage]) -> list[int]:
    """Return the position at which each passage of a row begins."""
    return [0, *accumulate(len(passage.ids) for passage in row)][: len(row)]


def _first_tokens(row: Sequence[Passage], count: int) -> list[int]:
    """Return the numbers of the first slots of each passage that does not stand where it was read."""
    return [
        start + token
        for start, passage in zip(_starts(row), row, strict=True)
        if start != passage.start
        for token in range(min(count, len(passage.ids)))
    ]


def _keys(
    adapter: PassageLayers, site: Site, rows: Sequence[Sequence[Passage]], starts: Sequence[Sequence[int]]
) -> Tensor:
    rotation = None if adapter.rotations is None else adapter.rotations[site.layer]

    def rotate(passage: Passage, start: int) -> Tensor:
        keys = passage.keys[site.layer].to(site.device)
        distance = start - passage.start
        return keys if rotation is None or not distance else rotation(keys.transpose(0, 1), distance).transpose(0, 1)

    turned = [
        [rotate(passage, start) for passage, start in zip(row, begin, strict=True)]
        for row, begin in zip(rows, starts, strict=True)
    ]
    assert site.heads is not None
    return _padded(turned, site.heads.num_kv_heads, site.heads.head_dim, site.device)


def _values(site: Site, rows: Sequence[Sequence[Passage]]) -> Tensor:
    values = [[passage.values[site.layer].to(site.device) for passage in row] for row in rows]
    assert site.heads is not None
    return _padded(values, site.heads.num_kv_heads, site.heads.value_dim or site.heads.head_dim, site.device)


def _tokens_again(rows: Sequence[Sequence[Passage]], again: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids, the mask and the slots (b, l) of the tokens that are read again."""
    length = max(map(len, again))
    # A row without any gathers slot 0 again; the mask hides the result.
    padded = torch.tensor([[*row, *[row[-1] if row else 0] * (length - len(row))] for row in again])
    ids = [[token for passage in row for token in passage.ids] or [0] for row in rows]
    tokens = torch.tensor([[line[slot] for slot in row] for line, row in zip(ids, padded.tolist(), strict=True)])
    return tokens, torch.arange(length) < torch.tensor([[max(len(row), 1)] for row in again]), padded


def _padded(rows: Sequence[Sequence[Tensor]], heads: int, width: int, device: torch.device) -> Tensor:
    """Return slots (m, g, k) of each row as (b, g, m, k), shorter rows filled with zeros."""
    first = next((one for row in rows for one in row), None)
    empty = torch.zeros(0, heads, width, device=device, dtype=None if first is None else first.dtype)
    return pad_sequence([torch.cat([empty, *row]) for row in rows], batch_first=True).transpose(1, 2).contiguous()


@torch.no_grad()
def capture(
    model: AdaptedModel, name: str, ids: Tensor, real: Tensor, positions: Tensor, joined: JoinedView | None = None
) -> Capture:
    """Record keys and values of every layer of a text (b, l), padded on the right, in eval mode.

    `real` (b, l) tells tokens from padding, `positions` is (b or 1, l), `joined` is visible to the text besides.
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
    if not captured.keys:
        raise ConditionError(
            f"passages are read by adapter {name!r}, which is not active: call set_adapter({name!r}), outside "
            "disable_adapter()"
        )
    return captured
