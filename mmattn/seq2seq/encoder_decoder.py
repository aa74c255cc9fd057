"""`EncoderDecoder`: a source is encoded to a memory, and a target is written while looking at it (arXiv 1706.03762)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.kv import KeyValue
from mmattn.core.layers import CrossAttention
from mmattn.core.paged_cache import PagePool
from mmattn.core.positions import Learned, Rotary, alibi, sinusoidal, token_positions
from mmattn.core.projection import upgrade_state_names
from mmattn.core.text_cache import Cache, GrowingCache
from mmattn.core.tracing import may_read
from mmattn.core.transformer import TransformerBlock
from mmattn.errors import (
    AdapterFileError,
    ConfigError,
    ShapeError,
    check_bool_mask,
    check_choice,
    check_float,
    check_int,
)
from mmattn.memory import Memory
from mmattn.seq2seq.generation import beam_search, greedy
from mmattn.storage.tensor_files import read_tensors, write_tensors

POSITIONS = ("sinusoidal", "learned", "rotary", "alibi")
FORMAT = "mmattn-seq2seq"
#: 2: keys and values of an attention have a module of their own (`kv_proj`).
FORMAT_VERSION = 2


class EncoderDecoder(nn.Module):
    """A transformer from a source (b, m) to a target (b, l) of token ids.

    Args:
        vocab_size: of both sides, whose embeddings and output are then one matrix; of the source, where
            `target_vocab_size` is given: then the target's embedding and the output are one (arXiv 1608.05859).
        dim: d. num_heads: h. layers: of the encoder, and of the decoder. feed_forward, norm, dropout: as in a block.
        positions: "sinusoidal" or "learned" vectors added to the embeddings, "rotary" or "alibi" in the self-attention.
        max_length: tokens of a source or target that "learned" positions hold; the others go on.
        cross_attention: False leaves out the encoder and all looking at it: a decoder that knows no source.

    >>> model = EncoderDecoder(97, dim=32, num_heads=4, layers=2).eval()
    >>> source = torch.tensor([[5, 6, 7], [8, 9, 0]])
    >>> model(source, torch.tensor([[1, 5], [1, 8]]), source_mask=source != 0).shape
    torch.Size([2, 2, 97])
    >>> [len(text) <= 11 for text in model.generate(source, mask=source != 0, start=1, end=2, max_length=11, beams=3)]
    [True, True]
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int = 512,
        num_heads: int = 8,
        layers: int = 6,
        *,
        target_vocab_size: int | None = None,
        positions: str = "sinusoidal",
        max_length: int = 512,
        feed_forward: float = 4.0,
        norm: str = "pre",
        dropout: float = 0.1,
        cross_attention: bool = True,
    ) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {
            "vocab_size": check_int("vocab_size", vocab_size),
            "dim": check_int("dim", dim),
            "num_heads": check_int("num_heads", num_heads),
            "layers": check_int("layers", layers),
            "target_vocab_size": target_vocab_size,
            "positions": check_choice("positions", positions, POSITIONS),
            "max_length": check_int("max_length", max_length),
            "feed_forward": feed_forward,
            "norm": norm,
            "dropout": check_float("dropout", dropout, at_least=0, below=1),
            "cross_attention": cross_attention,
        }
        if positions == "sinusoidal" and dim % 2:
            raise ConfigError(f"dim must be even for sinusoidal positions, got {dim}")
        if dim % num_heads:
            raise ShapeError(f"num_heads must divide dim, got {num_heads} and {dim}")
        self.dim, self.positions, self.max_length = dim, positions, max_length
        own = target_vocab_size is not None
        self.target_embedding = nn.Embedding(
            check_int("target_vocab_size", target_vocab_size) if own else vocab_size, dim
        )
        self.source_embedding = nn.Embedding(vocab_size, dim) if own and cross_attention else None
        for table in (self.target_embedding, self.source_embedding):
            if table is not None:
                nn.init.normal_(table.weight, std=dim**-0.5)
        self.source_positions = Learned(max_length, dim) if positions == "learned" and cross_attention else None
        self.target_positions = Learned(max_length, dim) if positions == "learned" else None
        made: dict[str, Any] = {"feed_forward": feed_forward, "norm": norm, "dropout": dropout}
        made["rotary"] = Rotary(dim // num_heads) if positions == "rotary" else None
        read = dim if cross_attention else None
        self.encoder = nn.ModuleList(
            TransformerBlock(dim, num_heads, **made) for _ in range(layers if cross_attention else 0)
        )
        self.decoder = nn.ModuleList(
            TransformerBlock(dim, num_heads, memory_dim=read, causal=True, **made) for _ in range(layers)
        )
        # With the norm inside the blocks, nothing has normalised what leaves the last one.
        self.encoder_norm = nn.LayerNorm(dim) if norm == "pre" and cross_attention else None
        self.decoder_norm = nn.LayerNorm(dim) if norm == "pre" else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (b, l, v) of the token after each of the target's, from the tokens before it and the whole source.

        Args:
            source: (b, m) ids. target: (b, l) ids, a start first. source_mask: (b, m) and target_mask: (b, l) bool,
                True = a token, False = padding, in front or behind.

        Raises:
            ShapeError: sizes that do not fit, a source or target without a token, an id outside the vocabulary, more
                tokens than learned positions. MaskError: a mask that is not bool.
        """
        if source.dim() == target.dim() == 2 and len(source) != len(target):
            raise ShapeError(f"source and target must have as many rows, got {len(source)} and {len(target)}")
        return self.decode(target, self.encode(source, source_mask), mask=target_mask)

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Memory:
        """The memory (b, m, d) of a source (b, m); `mask` (b, m) bool is its padding.

        Raises:
            ShapeError, MaskError: as for `forward`.
        """
        table = self.target_embedding if self.source_embedding is None else self.source_embedding
        self._check_ids("source", source, mask, table.num_embeddings, source.shape[-1])
        if not self.encoder:
            return Memory(torch.zeros(*source.shape, 0), mask, check_finite=False)
        places = _places(source, mask, 0)
        x = self._embed(source, table, self.source_positions, places)
        bias = self._bias(x, x.shape[1], 0)
        for block in self.encoder:
            x = block(x, mask=mask, positions=places, bias=bias)
        return Memory(x if self.encoder_norm is None else self.encoder_norm(x), mask, check_finite=False)

    @torch.no_grad()
    def prepare(self, memory: Memory) -> list[KeyValue]:
        """Keys and values of a memory for each layer of the decoder, made once for many steps; without gradients."""
        return [attention.project(memory.tokens, mask=memory.mask) for attention in self.attentions().values()]

    def decode(
        self,
        target: Tensor,
        memory: Memory | Sequence[KeyValue],
        *,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits (b, l, v) after each token of the target (b, l).

        Args:
            memory: of `encode`, or what `prepare` made of it. Its rows may be a divisor of b: row i of the target then
                reads row i // multiple (beams).
            mask: (b, l) bool, with a cache (b, n + l): the padding.
            cache: keys and values of the n tokens before these; those of these are put into it.

        Raises:
            ShapeError, MaskError: as for `forward`.
        """
        before = 0 if cache is None else cache.length
        length = before + target.shape[-1]
        self._check_ids("target", target, mask, self.target_embedding.num_embeddings, length)
        self._check_memory(memory, len(target))
        places = _places(target, mask, before)
        x = self._embed(target, self.target_embedding, self.target_positions, places)
        bias = self._bias(x, length, before)
        for number, block in enumerate(self.decoder):
            read: dict[str, Any] = {}
            if self.encoder and isinstance(memory, Memory):
                read = {"memory": memory.tokens, "memory_mask": memory.mask}
            elif self.encoder:
                read = {"memory": memory[number]}
            kept = None if cache is None else partial(cache.append, number)
            x = block(x, mask=mask, positions=places, bias=bias, cache=kept, **read)
        x = x if self.decoder_norm is None else self.decoder_norm(x)
        return F.linear(x, self.target_embedding.weight)

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        *,
        start: int,
        end: int,
        mask: Tensor | None = None,
        beams: int = 1,
        length_penalty: float = 1.0,
        max_length: int = 64,
        prefix: Tensor | None = None,
        cache: Cache | bool = True,
    ) -> list[list[int]]:
        """Write a target for each row of a source (b, m): ids without the start and the end.

        Args:
            start, end: ids that begin and end a target. mask: (b, m) bool, the padding of the source.
            beams: 1 takes the most probable token each time. length_penalty: as in `beam_search`.
            max_length: tokens of a target at most, the end included.
            prefix: (b, n) ids that every target begins with, the start first.
            cache: True keeps keys and values of the target from step to step, False reads all of it again at each step.
                Or a cache to use: empty, or holding the first tokens of `prefix`, which are not read again.

        Raises:
            ShapeError, MaskError, ConfigError: as for `forward`; `prefix` does not fit the source, the cache or the
                length; more beams than a vocabulary has tokens besides the end.
        """
        begin = torch.full((len(source), 1), check_int("start", start, at_least=0), device=source.device)
        tokens = begin if prefix is None else prefix
        kept: Cache | None = GrowingCache() if cache is True else None if cache is False else cache
        held = 0 if kept is None else kept.length
        if (
            tokens.dim() != 2
            or len(tokens) != len(source)
            or not held < tokens.shape[1] <= check_int("max_length", max_length)
        ):
            raise ShapeError(
                f"prefix must be (b, n) with b = {len(source)} and n above the {held} tokens of the cache and at most "
                f"max_length = {max_length}, got {tuple(tokens.shape)}"
            )
        if self.positions == "learned" and max_length > self.max_length:
            raise ShapeError(f"max_length may be {self.max_length}, the learned positions there are; got {max_length}")
        check_int("beams", beams, at_most=self.target_embedding.num_embeddings - 1)
        check_int("end", end, at_least=0, at_most=self.target_embedding.num_embeddings - 1)
        memory = self.prepare(self.encode(source, mask))

        def step(tokens: Tensor) -> Tensor:
            begin = 0 if kept is None else kept.length
            return self.decode(tokens[:, begin:], memory, cache=kept)[:, -1]

        if beams == 1:
            return greedy(step, tokens, end=end, max_length=max_length)

        reorder = (lambda rows: None) if kept is None else kept.reorder
        check_float("length_penalty", length_penalty)
        given: dict[str, Any] = {"end": end, "max_length": max_length}
        return beam_search(step, reorder, tokens, beams=beams, length_penalty=length_penalty, **given)

    def make_pool(self, page_size: int = 16) -> PagePool:
        """A pool of pages for caches of this model's targets: `generate(…, cache=pool.cache(rows=b))`."""
        h, weight = self.settings["num_heads"], self.target_embedding.weight
        made: dict[str, Any] = {"page_size": page_size, "device": weight.device, "dtype": weight.dtype}
        return PagePool(len(self.decoder), h, self.dim // h, **made)

    def attentions(self) -> dict[tuple[str, int], CrossAttention]:
        """What attends to the source, by layer of the decoder: what `mmattn.record` listens to."""
        blocks = [block for block in self.decoder if isinstance(block, TransformerBlock)]
        found = enumerate(block.cross_attention for block in blocks)
        return {("source", number): attention for number, attention in found if attention is not None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write settings and weights to one safetensors file, whole or not at all.

        Raises:
            OSError: the folder is missing or full; what was at `path` is unchanged.
        """
        metadata = {"format": FORMAT, "format_version": FORMAT_VERSION, "settings": self.settings}
        write_tensors(path, self.state_dict(), metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EncoderDecoder:
        """The model that `save` wrote, on the CPU and in training mode.

        Raises:
            AdapterFileError: the file is torn, changed, or its settings and weights do not belong together.
        """
        weights, metadata = read_tensors(path, FORMAT)
        version = metadata.get("format_version", 1)
        if version > FORMAT_VERSION:
            raise AdapterFileError(
                f"{path} was written in format_version {version}, and this mmattn reads 1 to {FORMAT_VERSION}: "
                "upgrade mmattn, or save the model again with this one"
            )
        if version < 2:
            weights = upgrade_state_names(weights)
        try:
            settings = metadata["settings"]
            layers = len({name.split(".")[1] for name in weights if name.startswith("decoder.")})
            if settings["layers"] != layers:
                raise ConfigError(f"layers is {settings['layers']}, and there are weights of {layers}")
            # No memory is taken for sizes that a wrong setting asks for.
            with torch.device("meta"):
                model = cls(**settings)
            model.load_state_dict(weights, assign=True)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise AdapterFileError(f"{path}: its settings and its weights do not belong together ({reason})") from error
        return model

    def _embed(self, ids: Tensor, table: nn.Embedding, learned: Learned | None, places: Tensor) -> Tensor:
        x = table(ids) * math.sqrt(self.dim)
        if self.positions == "sinusoidal":
            x = x + sinusoidal(places, self.dim).to(x.dtype)
        if learned is not None:
            x = x + learned(places)
        return self.dropout(x)

    def _bias(self, x: Tensor, m: int, offset: int) -> Tensor | None:
        return alibi(self.settings["num_heads"], x.shape[1], m, offset).to(x) if self.positions == "alibi" else None

    def _check_memory(self, memory: Memory | Sequence[KeyValue], rows: int) -> None:
        """Refuse a memory that no target of so many rows can read, before a cache is touched."""
        if not self.encoder:
            return
        if isinstance(memory, Memory):
            held, fits, given = memory.batch, memory.dim == self.dim, f"a memory of width {memory.dim}"
        else:
            held = memory[0].batch if len(memory) else 0
            fits, given = len(memory) == len(self.decoder), f"keys and values of {len(memory)} layers"
        if not fits or (rows != held and (held == 0 or rows % held)):
            raise ShapeError(
                f"a target of {rows} rows reads a memory of as many rows or a divisor of them (beams), of width "
                f"{self.dim} or prepared for {len(self.decoder)} layers; got {given} and {held} rows"
            )

    def _check_ids(self, name: str, ids: Tensor, mask: Tensor | None, vocabulary: int, length: int) -> None:
        """Refuse ids (b, ·) that are no text of `length` tokens in all."""
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ShapeError(f"{name} must be (b, l) ids, int64 or int32; got {tuple(ids.shape)} {ids.dtype}")
        if not ids.shape[1]:
            raise ShapeError(f"the {name} is empty, {tuple(ids.shape)}: give each row a token at least")
        if mask is not None and check_bool_mask(f"{name}_mask", mask).shape != (len(ids), length):
            raise ShapeError(f"{name}_mask must be {(len(ids), length)}, got {tuple(mask.shape)}")
        if self.positions == "learned" and length > self.max_length:
            raise ShapeError(
                f"the {name} has {length} tokens and there are {self.max_length} learned positions: cut it, or build "
                "the model with a larger max_length or with other positions"
            )
        if not may_read(ids) or not len(ids):
            return
        if mask is not None and not bool(mask.any(1).all()):
            raise ShapeError(f"row {int((~mask.any(1)).nonzero()[0])} of the {name} has no token, only padding")
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ShapeError(
                f"ids of the {name} must lie in 0…{vocabulary - 1}, its vocabulary; got {low}…{high}: they come from "
                "another tokenizer than the model was made for"
            )


def _places(ids: Tensor, mask: Tensor | None, before: int) -> Tensor:
    """Where each token of (b, l) stands, behind `before` others: (l,), or (b, l) where there is padding."""
    length = ids.shape[1]
    if mask is None:
        return torch.arange(before, before + length, device=ids.device)
    return token_positions(mask)[:, -length:]
