"""The text of one forward: its tokens, how many came before them, if available the whole text; and packed rows.

Packed rows hold several documents, each with a row of memory of its own: their tokens are gathered as rows, adapted,
and put back. Whatever is no part of a document passes through.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConditionError

#: Arguments of a host by name.
Keywords = Mapping[str, Any]
#: Names under which flash attention and state-space models are told where documents begin.
BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens")


@dataclass(frozen=True)
class PackedText:
    """Documents of packed rows."""

    numbers: Tensor  # (b, l) the number of the document of each token, rising through the flattened rows; -1 is none
    tokens: Tensor  # (t,) places of the tokens of all documents in the flattened rows, in order
    places: Tensor  # (s, longest) the same by document; a shorter one repeats its last
    real: Tensor  # (s, longest) bool, which of them are tokens of the document

    @classmethod
    def of(cls, documents: Tensor) -> PackedText:
        """From the number of the document of each token."""
        flat = documents.flatten()
        tokens = (flat >= 0).nonzero()[:, 0]
        _, lengths = torch.unique_consecutive(flat[tokens], return_counts=True)
        count = torch.arange(int(lengths.max()), device=flat.device)
        starts = lengths.cumsum(0) - lengths
        places = tokens[starts[:, None] + torch.minimum(count, lengths[:, None] - 1)]
        return cls(documents, tokens, places, count < lengths[:, None])

    @property
    def documents(self) -> int:
        """s, documents in all rows."""
        return self.places.shape[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return self.places.shape[1]

    def select(self, rows: Sequence[int], first: Sequence[int], count: int) -> PackedText:
        """The same rows with `count` tokens of some documents, from a first token of each on; others are passed by."""
        columns = [[start + number for number in range(count)] for start in first]
        places = self.places[[[row] for row in rows], columns]
        return PackedText(self.numbers, places.flatten(), places, torch.ones_like(places, dtype=torch.bool))

    def unpack(self, x: Tensor) -> Tensor:
        """Documents as rows (s, longest, …); what follows a shorter one repeats its last token."""
        return x.flatten(0, 1)[self.places.to(x.device)]

    def pack(self, documents: Tensor, x: Tensor) -> Tensor:
        """x (b, l, …) with the tokens of the documents in place of its own."""
        flat, tokens = x.flatten(0, 1), self.tokens.to(x.device)
        return flat.index_copy(0, tokens, documents[self.real.to(x.device)]).view_as(x)


#: Arguments of a host that may say where documents begin.
PACKING_NAMES = {*BOUNDARIES, "seq_idx", "position_ids"}


def packed_text(kwargs: Keywords, rows: int, length: int) -> PackedText | None:
    """Return the documents of a call, or None if each row is one document.

    A document begins where positions do not rise, or where `cu_seq_lens_q` or `seq_idx` say so. Where a mask says of
    each token what it sees (four dimensions, or another object), positions say nothing: those of a tree repeat.
    """
    if torch.compiler.is_compiling():
        return None  # depends on tensor values, which are unknown while tracing
    numbers = _numbers(kwargs, rows, length)
    return None if numbers is None else PackedText.of(numbers)


def _numbers(kwargs: Keywords, rows: int, length: int) -> Tensor | None:
    """The number of the document of each token (b, l), -1 for none; None where rows are not packed."""
    boundaries = next((kwargs[name] for name in BOUNDARIES if kwargs.get(name) is not None), None)
    if boundaries is not None:
        place = torch.arange(rows * length, device=boundaries.device)
        number = torch.searchsorted(boundaries, place, right=True) - 1
        return number.masked_fill(place >= boundaries[-1], -1).view(rows, length)
    mask, index, positions = (kwargs.get(name) for name in ("attention_mask", "seq_idx", "position_ids"))
    real = None  # the tokens that are no padding
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= length:
        real = mask[:, -length:].bool().expand(rows, -1)
    if index is not None:
        real = index >= 0 if real is None else real.to(index.device) & (index >= 0)
        starts = index[:, 1:] != index[:, :-1]
    elif mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return None
    elif isinstance(positions, Tensor) and positions.dim() == 2 and length > 1:
        positions = positions.expand(rows, -1)
        real = torch.ones_like(positions, dtype=torch.bool) if real is None else real.to(positions.device)
        starts = (positions[:, 1:] <= positions[:, :-1]) & real[:, 1:] & real[:, :-1]
        if not bool(starts.any()):
            return None
    else:
        return None
    begins = torch.cat([real[:, :1], (starts | ~real[:, :-1]) & real[:, 1:]], 1)
    return (begins.flatten().cumsum(0) - 1).view(rows, -1).masked_fill(~real, -1)


@dataclass(frozen=True)
class GenerationInput:
    """The next input of `generate`."""

    ids: Tensor  # token ids of the text so far (b, any)
    mask: Tensor | None  # (b, t) bool, True = a real token; None where every token is real


@dataclass(frozen=True)
class Arrivals:
    """Number of memory slots that had arrived at each token."""

    count: Tensor  # (b, l) int
    window: int | None = None  # how many of the latest each token sees; None for all


@dataclass(frozen=True, eq=False)
class TextState:
    """The tokens of one forward of a host, and what is known of the text that they continue."""

    rows: int  # b, rows of the batch
    length: int  # l, tokens (or pixels) of this forward
    # ids (b, l) or embeddings (b, l, d) that the host was called with; None where only a part of the host was called
    inputs: Tensor | None = None
    past: int | None = None  # tokens in the host's cache; None where the host does not say
    cache: object = None  # the host's cache itself; None where it was given none
    attention_mask: object = None  # what the host was called with under this name
    images: Tensor | None = None  # (b, l) int, images begun at or before each token, where the caller says so
    arrivals: Arrivals | None = None  # how many slots of the memory had arrived at each token, where the caller says so
    prompt: Tensor | None = None  # what `generate` was called with, ids (b, l) or embeddings (b, l, d)
    # inside `generate`, how many rows of text a row of the prompt may have become (beams); else empty
    expansions: Collection[int] = ()
    generation: GenerationInput | None = None  # what `generate` last prepared for the host
    layer: int | None = None  # the only layer that asks, where only a part of the host was called
    packed: PackedText | None = None  # where the rows lie that are the documents of packed rows
    positions: Tensor | None = None  # (b, l) of the tokens of packed rows, where the host is told
    timestep: Tensor | None = None  # (b,), of a diffusion model; None where it is not known

    def rows_of(self, tokens: Tensor) -> list[int]:
        """Return the rows, or documents, that hold some tokens (b, l) which are no padding."""
        number, mask = torch.arange(len(tokens), device=tokens.device)[:, None], self.attention_mask
        if self.packed is not None:
            number = self.packed.numbers.to(tokens.device)[:, -tokens.shape[1] :]
        elif isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= tokens.shape[1]:
            number = number.where(mask[:, -tokens.shape[1] :].to(tokens.device).bool(), -1)
        return [row for row in number.expand(tokens.shape)[tokens].unique().tolist() if row >= 0]

    @property
    def input_ids(self) -> Tensor | None:
        """Token ids (b, l) of this forward, None where it was given embeddings or nothing is known."""
        return None if self.inputs is None or self.inputs.is_floating_point() else self.inputs

    @cached_property
    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Return which tokens of the text so far are real (b, t) bool, and their ids (b, t) if known."""
        if self.inputs is None:
            raise ConditionError(
                "what this adapter reads depends on the whole text, and only a part of the host was called: call the "
                "object that was given to attach"
            )
        real, ids = self._real_tokens(), self.inputs
        if self.generation is not None:
            ids = self.generation.ids
            if ids.shape[1] != real.shape[1] and self.prompt is not None:
                # A prompt that is prefilled in chunks is prepared chunk by chunk.
                ids = self.prompt[:, : real.shape[1]].repeat_interleave(self.rows // self.prompt.shape[0], 0)
        return real, ids if ids.shape == real.shape and not ids.is_floating_point() else None

    def _length_so_far(self) -> int | None:
        """Return the number of tokens of the text so far, or None."""
        if self.past is not None:
            return self.past + self.length
        if self.generation is None:
            return None
        embedded = self.prompt is not None and self.prompt.is_floating_point()
        return self.generation.ids.shape[1] + (self.prompt.shape[1] if embedded and self.prompt is not None else 0)

    def _real_tokens(self) -> Tensor:
        """Return which tokens of the text so far are real, (b, t) bool."""
        total = self._length_so_far()
        mask = self.attention_mask if self.generation is None else self.generation.mask
        if mask is None and total is not None and self.inputs is not None:
            return torch.ones(self.rows, total, dtype=torch.bool, device=self.inputs.device)
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == total:
            return mask.bool()
        actual = f"of {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        past = "an unknown number" if self.past is None else self.past
        raise ConditionError(
            f"which tokens of the whole text are real must be known: attention_mask is {actual}, for {self.length} "
            f"tokens after {past} in the cache; give it as (b, all tokens so far), or use generate"
        )

    def images_begun(self, media_token: int | None) -> Tensor:
        """Count the images begun at or before each token of this forward, (b, l)."""
        images, ids = self.images, self.input_ids
        if images is None and media_token is not None:
            if self.prompt is not None and not self.prompt.is_floating_point():
                images = images_so_far(self.prompt, media_token)
            elif ids is not None and self.past == 0:
                images = images_so_far(ids, media_token)
        if images is None:
            raise ConditionError(
                "visible_segments must know which images began before each token: give images=(b, l), or media_token= "
                "to the adapter and the text from its first token on"
            )
        return self._of_tokens("images", images)

    def arrived_slots(self, slots: int, device: torch.device) -> Tensor:
        """Return the slots that had arrived at each token, (b, 1, l, m), of a call with `arrived`."""
        assert self.arrivals is not None
        count = self._of_tokens("arrived", self.arrivals.count)[:, None, :, None].to(device)
        number = torch.arange(slots, device=device)
        arrived = number < count
        return arrived if self.arrivals.window is None else arrived & (number >= count - self.arrivals.window)

    def _of_tokens(self, name: str, known: Tensor) -> Tensor:
        """Select values of the text's tokens (b, any) for those of this forward (b, l)."""
        past = 0 if known.shape[1] == self.length and not self.expansions else self.past
        if past is None:
            raise ConditionError(
                f"the host does not say how many tokens came before this forward: give {name}=(b, l) for its tokens"
            )
        if known.shape[0] != self.rows:
            known = known.repeat_interleave(self.rows // known.shape[0], 0)
        # Tokens written after the prompt are like its last one.
        index = torch.arange(past, past + self.length, device=known.device).clamp(max=known.shape[1] - 1)
        return known[:, index]


def images_so_far(input_ids: Tensor, media_token: int) -> Tensor:
    """Count the images begun at or before each token, (b, l), from the ids (b, l)."""
    return (input_ids == media_token).cumsum(1)
