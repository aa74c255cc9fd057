"""Keys and values of passages that stand one after the other before the text of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmattn.adapters.host_models import device_of, embeddings_of, to_device
from mmattn.adapters.joined.slots import Capture, JoinedSlots, JoinedView
from mmattn.adapters.passages import PassageLayers
from mmattn.errors import ConditionError
from mmattn.hosts.causal_lm.joined_slots import capture
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.probe import in_eval_mode

#: Ids of a passage, by which it is known.
Ids = tuple[int, ...]


#: Keys, or values, of successive layers of a group (layers, g, m, k): one tensor, or several while they are in a file.
Pieces = Sequence[Tensor]


@dataclass(frozen=True)
class Passage:
    """Ids of a passage, and its keys and values by group of layers, as at positions from `start` on.

    `has_windows`: some layers attend to a limited number of tokens before.
    """

    ids: Ids
    keys: Sequence[Pieces]
    values: Sequence[Pieces]
    has_windows: bool = False
    start: int = 0

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(piece.nbytes for part in (self.keys, self.values) for pieces in part for piece in pieces)

    def loaded(self, pinned: bool) -> Passage:
        """Return the passage out of its file, in memory from which a device copies without a wait if it is pinned."""
        keys, values = ([torch.cat([*pieces]) for pieces in part] for part in (self.keys, self.values))
        if pinned:
            keys, values = ([piece.pin_memory() for piece in part] for part in (keys, values))
        return replace(self, keys=[[piece] for piece in keys], values=[[piece] for piece in values])


def as_one(pieces: Pieces) -> Tensor:
    """Return keys, or values, of a group of layers as one tensor."""
    return pieces[0] if len(pieces) == 1 else torch.cat([*pieces])


def join_passages(adapter: PassageLayers, rows: Sequence[Sequence[Passage]]) -> JoinedSlots:
    """Return the slots of the passages of rows, one after the other; side by side where keys cannot be turned."""
    device, lengths = adapter.weight.device, [sum(len(passage.ids) for passage in row) for row in rows]
    distances = None
    if adapter.rotations is None:  # side by side, where they were read
        places = [[_arange(len(passage.ids), passage.start) for passage in row] for row in rows]
        positions = pad_sequence([torch.cat([_integers([]), *row]) for row in places], batch_first=True)
        ends = [max((passage.start + len(passage.ids) for passage in row), default=0) for row in rows]
    else:
        positions, ends = _arange(max(lengths)).expand(len(rows), -1), lengths
        distances = _distances(rows)
    real = _arange(max(lengths)) < _integers(lengths)[:, None]
    mask, positions, offsets = (to_device(tensor, device) for tensor in (real, positions, _integers(ends)))
    return JoinedSlots(*_joined(adapter, rows, lengths, distances), mask, positions, offsets, lengths)


def read_again(
    model: AdaptedModel, adapter: PassageLayers, rows: Sequence[Sequence[Passage]], slots: JoinedSlots, count: int
) -> JoinedSlots:
    """Return the slots after the host has read the first tokens of passages again at their positions."""
    windows = any(passage.has_windows for row in rows for passage in row)
    if adapter.rotations is None or windows:
        why = "whose layers see back over a window" if windows else "with learned positions"
        raise ConditionError(
            f"recomputed_tokens={count} reads first tokens of passages again where they stand, "
            f"which is not done in a host {why}: leave it out"
        )
    again = [_first_tokens(row, count) for row in rows]
    if not any(again):
        return slots
    assert slots.positions is not None
    tokens, real, positions = _tokens_again(rows, again)
    unread = slots.mask.clone()
    for number, row in enumerate(again):
        unread[number, row] = False
    before = slots.positions[:, None] < to_device(positions, unread.device)[..., None]
    visible = JoinedSlots(slots.keys, slots.values, unread, slots.positions)
    captured = read_text(model, adapter.name, tokens, real, positions, JoinedView(visible, before))
    for layer in adapter.layers:
        for number, row in enumerate(again):
            slots.keys[layer][number, :, row] = captured.keys[layer][number, :, : len(row)]
            slots.values[layer][number, :, row] = captured.values[layer][number, :, : len(row)]
    return slots


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


def _distances(rows: Sequence[Sequence[Passage]]) -> Tensor | None:
    """Return the number of positions each slot of a row moves by (b, m); None without a move."""
    moved = [[start - passage.start for start, passage in zip(_starts(row), row, strict=True)] for row in rows]
    if not any(map(any, moved)):
        return None
    lengths = [[len(passage.ids) for passage in row] for row in rows]
    distances = [
        torch.repeat_interleave(_integers(by), _integers(counts), output_size=sum(counts))
        for by, counts in zip(moved, lengths, strict=True)
    ]
    return pad_sequence(distances, batch_first=True)


def _arange(count: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + count, device="cpu")


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device="cpu")


def _joined(
    adapter: PassageLayers, rows: Sequence[Sequence[Passage]], lengths: Sequence[int], distances: Tensor | None
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return keys, moved by distances (b, m), and values by layer (b, g, m, k) of the passages of rows."""
    keys: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    passages = {id(passage): passage for row in rows for passage in row}
    for number, (layers, device, heads, rotation) in enumerate(adapter.groups()):
        for part, by_layer, width in (
            ("keys", keys, heads.head_dim),
            ("values", values, heads.value_dim or heads.head_dim),
        ):
            blocks = {
                key: to_device(as_one(getattr(passage, part)[number]), device) for key, passage in passages.items()
            }
            empty = torch.zeros(len(layers), heads.num_kv_heads, 0, width, device=device)
            joined = _in_rows([[blocks[id(passage)] for passage in row] for row in rows], lengths, empty)
            if part == "keys" and rotation is not None and distances is not None:
                rotation.rotate_layers_(joined, to_device(distances, device)[:, None])
            by_layer.update(zip(layers, joined.unbind(), strict=True))
    return keys, values


def _in_rows(rows: Sequence[list[Tensor]], lengths: Sequence[int], empty: Tensor) -> Tensor:
    """Return slots (layers, g, m, k) of each row as (layers, b, g, m, k), shorter rows filled with zeros."""
    if len(rows) == 1:
        return torch.cat(rows[0] or [empty], 2)[:, None]
    first = next((passage for row in rows for passage in row), empty)
    layers, heads, _, width = first.shape
    joined = first.new_zeros(layers, len(rows), heads, max(lengths), width)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row:
            torch.cat(row, 2, out=joined[:, number, :, :length])
    return joined


def _tokens_again(rows: Sequence[Sequence[Passage]], again: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids, the mask and the slots, which are the positions, of the tokens that are read again (b, l)."""
    length = max(map(len, again))
    # A row without any gathers slot 0 again; the mask hides the result.
    padded = torch.tensor([[*row, *[row[-1] if row else 0] * (length - len(row))] for row in again])
    ids = [[token for passage in row for token in passage.ids] or [0] for row in rows]
    tokens = torch.tensor([[line[slot] for slot in row] for line, row in zip(ids, padded.tolist(), strict=True)])
    return tokens, torch.arange(length) < torch.tensor([[max(len(row), 1)] for row in again]), padded


@torch.no_grad()
def read_text(
    model: AdaptedModel, name: str, ids: Tensor, real: Tensor, positions: Tensor, joined: JoinedView | None = None
) -> Capture:
    """Record keys and values of every layer of a text (b, l), padded on the right, in eval mode.

    `real` (b, l) tells tokens from padding, `positions` is (b or 1, l), `joined` is visible to the text besides.
    """
    captured, device = Capture(joined), device_of(embeddings_of(model.host))
    with in_eval_mode(model.host), torch.inference_mode(False), torch.no_grad():
        ids, mask, positions = ids.to(device), real.long().to(device), positions.expand(len(ids), -1).to(device)
        capture(model, name, captured, input_ids=ids, attention_mask=mask, position_ids=positions)
    if not captured.keys:
        raise ConditionError(
            f"passages are read by adapter {name!r}, which is not active: call set_adapter({name!r}), outside "
            "disable_adapter()"
        )
    return captured
