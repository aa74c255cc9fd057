"""`EncoderDecoder`: the transformer of arXiv 1706.03762, whose decoder cross-attends to an encoded source."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.cross_attention import CrossAttention
from mmattn.core.kv_cache import KeyValue
from mmattn.core.positions import Learned, Rotary, alibi, sinusoidal, token_positions
from mmattn.errors import (
    ConfigError,
    ShapeError,
    check_choice,
    check_float,
    check_int,
)
from mmattn.memory import Memory
from mmattn.seq2seq.checks import check_ids, check_memory
from mmattn.seq2seq.generation import beam_search, greedy
from mmattn.seq2seq.kv_cache import Cache, GrowingCache
from mmattn.seq2seq.paged_cache import PagePool
from mmattn.seq2seq.transformer import TransformerBlock
from mmattn.storage.json_files import making_sense
from mmattn.storage.safetensors import read_tensors, write_tensors

Made = TypeVar("Made")
POSITIONS = ("sinusoidal", "learned", "rotary", "alibi")
FORMAT = "mmattn-seq2seq"


class EncoderDecoder(nn.Module):
    """An encoder–decoder transformer from source ids (b, m) to the logits of target ids (b, l).

    Args:
        vocab_size: v of source and target, whose embeddings and output projection are then one matrix; of the source
            alone where `target_vocab_size` is given.
        dim: width d.
        num_heads: h, which divides d.
        layers: of the encoder, and as many of the decoder.
        target_vocab_size: v of the target, whose embedding and output projection are one matrix (arXiv 1608.05859).
        positions: "sinusoidal" or "learned" vectors added to the embeddings, "rotary" or "alibi" in the self-attention.
        max_length: tokens of a source or target for which there are "learned" positions; the others have no limit.
        feed_forward: as in `TransformerBlock`.
        norm: as in `TransformerBlock`.
        dropout: as in `TransformerBlock`, and of the embeddings.
        cross_attention: False leaves out the encoder and the cross-attention: a decoder without a source.

    Raises:
        ConfigError: a setting outside what is allowed.
        ShapeError: `num_heads` does not divide `dim`.

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
        two_vocabularies = target_vocab_size is not None
        target_size = check_int("target_vocab_size", vocab_size if target_vocab_size is None else target_vocab_size)
        self.target_embedding = nn.Embedding(target_size, dim)
        self.source_embedding = _if(two_vocabularies and cross_attention, nn.Embedding, vocab_size, dim)
        for table in (self.target_embedding, self.source_embedding):
            if table is not None:
                nn.init.normal_(table.weight, std=dim**-0.5)
        learned = positions == "learned"
        self.source_positions = _if(learned and cross_attention, Learned, max_length, dim)
        self.target_positions = _if(learned, Learned, max_length, dim)
        rotary = _if(positions == "rotary", Rotary, dim // num_heads)
        block = partial(
            TransformerBlock, dim, num_heads, feed_forward=feed_forward, norm=norm, dropout=dropout, rotary=rotary
        )
        self.encoder = nn.ModuleList(block() for _ in range(layers) if cross_attention)
        memory_dim = dim if cross_attention else None
        self.decoder = nn.ModuleList(block(memory_dim=memory_dim, causal=True) for _ in range(layers))
        # With the norm inside the blocks, nothing has normalised what leaves the last one.
        self.encoder_norm = _if(norm == "pre" and cross_attention, nn.LayerNorm, dim)
        self.decoder_norm = _if(norm == "pre", nn.LayerNorm, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (b, l, v) of the token that follows each token of the target, given the whole source.

        Args:
            source: (b, m) ids.
            target: (b, l) ids, the start first.
            source_mask: (b, m) bool, True = a token, False = padding, before or after the text.
            target_mask: (b, l) bool, True = a token, False = padding, before or after the text.

        Raises:
            ShapeError: sizes that do not fit, a source or target without a token, an id outside the vocabulary, more
                tokens than learned positions.
            MaskError: a mask that is not bool.
        """
        if source.dim() == target.dim() == 2 and len(source) != len(target):
            raise ShapeError(f"source and target must have as many rows, got {len(source)} and {len(target)}")
        return self.decode(target, self.encode(source, source_mask), mask=target_mask)

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Memory:
        """The memory (b, m, d) of a source.

        Args:
            source: (b, m) ids.
            mask: (b, m) bool, True = a token, False = padding.

        Raises:
            ShapeError: sizes that do not fit, no token, an id outside the vocabulary, too many for learned positions.
            MaskError: a mask that is not bool.
        """
        table = self.target_embedding if self.source_embedding is None else self.source_embedding
        check_ids("source", source, mask, table.num_embeddings, source.shape[-1], self._limit)
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
        """Keys and values of a memory for each layer of the decoder, computed once for many steps, without gradients.

        Args:
            memory: of `encode`.
        """
        return [attention.project(memory.tokens, mask=memory.mask) for attention in self.attentions().values()]

    def decode(
        self,
        target: Tensor,
        memory: Memory | Sequence[KeyValue],
        *,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits (b, l, v) of the token that follows each token of the target, given a memory.

        Args:
            target: (b, l) ids, the start first.
            memory: of `encode`, or the keys and values that `prepare` computed of it. The number of its rows may divide
                b: row i of the target then attends to row i // multiple (beams).
            mask: (b, l) bool, with a cache (b, n + l): True = a token, False = padding.
            cache: keys and values of the n tokens before these; those of these are appended.

        Raises:
            ShapeError: sizes that do not fit, no token, an id outside the vocabulary, too many for learned positions.
            MaskError: a mask that is not bool.
        """
        before = 0 if cache is None else cache.length
        length = before + target.shape[-1]
        check_ids("target", target, mask, self.target_embedding.num_embeddings, length, self._limit)
        if self.encoder:
            check_memory(memory, len(target), self.dim, len(self.decoder))
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
        """Generate a target for each row of a source: ids without the start and the end.

        Args:
            source: (b, m) ids.
            start: id that begins a target.
            end: id that ends a target.
            mask: (b, m) bool of the source, True = a token, False = padding.
            beams: of the beam search; 1 is greedy decoding.
            length_penalty: as in `beam_search`.
            max_length: tokens of a target at most, the end included.
            prefix: (b, n) ids that every target begins with, the start first.
            cache: True caches keys and values of the target from step to step, False computes them again at each step.
                Or a cache to use: empty, or with the first tokens of `prefix`, which are not computed again.

        Raises:
            ShapeError: as `forward`, or `prefix` does not fit the source, the cache or `max_length`.
            MaskError: a mask that is not bool.
            ConfigError: a number outside its range, or more beams than the vocabulary has tokens besides the end.
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
        """A pool of pages for the caches of targets: `generate(…, cache=pool.cache(rows=b))`.

        Args:
            page_size: tokens of a page.

        Raises:
            ConfigError: `page_size` is no positive int.
        """
        h, weight = self.settings["num_heads"], self.target_embedding.weight
        made: dict[str, Any] = {"page_size": page_size, "device": weight.device, "dtype": weight.dtype}
        return PagePool(len(self.decoder), h, self.dim // h, **made)

    def attentions(self) -> dict[tuple[str, int], CrossAttention]:
        """The cross-attention of each decoder layer, by ("source", layer): what `mmattn.inspect.record` records."""
        blocks = [block for block in self.decoder if isinstance(block, TransformerBlock)]
        found = enumerate(block.cross_attention for block in blocks)
        return {("source", number): attention for number, attention in found if attention is not None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write settings and weights to one safetensors file, atomically.

        Args:
            path: the file to be written.

        Raises:
            OSError: the folder is missing or full; what was at `path` is unchanged.
        """
        metadata = {"format": FORMAT, "settings": self.settings}
        write_tensors(path, self.state_dict(), metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EncoderDecoder:
        """Load the model that `save` wrote, on the CPU and in training mode.

        Args:
            path: of the file.

        Raises:
            AdapterFileError: the file is torn, changed, or its settings and weights do not belong together.
            NonFiniteError: NaN or infinity in the weights.
        """
        weights, metadata = read_tensors(path, FORMAT)
        with making_sense(path, "model whose weights are those of its settings"):
            settings = metadata["settings"]
            layers = len({name.split(".")[1] for name in weights if name.startswith("decoder.")})
            if settings["layers"] != layers:
                raise ConfigError(f"layers is {settings['layers']}, and there are weights of {layers}")
            # No memory is taken for sizes that a wrong setting asks for.
            with torch.device("meta"):
                model = cls(**settings)
            model.load_state_dict(weights, assign=True)
            dtypes = {weight.dtype for weight in model.parameters()}
            if len(dtypes) > 1 or any(not one.is_floating_point or one.itemsize == 1 for one in dtypes):
                raise ConfigError(f"weights have one floating point dtype, and there are {dtypes}")
        return model

    @property
    def _limit(self) -> int | None:
        """Tokens for which there are positions; None for no limit."""
        return self.max_length if self.positions == "learned" else None

    def _embed(self, ids: Tensor, table: nn.Embedding, learned: Learned | None, places: Tensor) -> Tensor:
        x = table(ids) * math.sqrt(self.dim)
        if self.positions == "sinusoidal":
            x = x + sinusoidal(places, self.dim).to(x.dtype)
        if learned is not None:
            x = x + learned(places)
        return self.dropout(x)

    def _bias(self, x: Tensor, m: int, offset: int) -> Tensor | None:
        return alibi(self.settings["num_heads"], x.shape[1], m, offset).to(x) if self.positions == "alibi" else None


def _if(condition: bool, kind: Callable[..., Made], *arguments: Any) -> Made | None:
    return kind(*arguments) if condition else None


def _places(ids: Tensor, mask: Tensor | None, before: int) -> Tensor:
    """Positions of the tokens (b, l) after `before` cached ones: (l,), or (b, l) where there is padding."""
    length = ids.shape[1]
    if mask is None:
        return torch.arange(before, before + length, device=ids.device)
    return token_positions(mask)[:, -length:]
