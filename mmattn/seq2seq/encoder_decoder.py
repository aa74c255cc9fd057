"""`EncoderDecoder`: the transformer of arXiv 1706.03762, whose decoder cross-attends to an encoded source."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.cross_attention import CrossAttention
from mmattn.core.kv_cache import KeyValue
from mmattn.core.positions import Learned, Rotary, alibi, sinusoidal, token_positions
from mmattn.core.tracing import may_read
from mmattn.errors import ConfigError, ShapeError, check_bool_mask, check_choice, check_float, check_int
from mmattn.memory import Memory
from mmattn.seq2seq.generation import beam_search, greedy
from mmattn.seq2seq.transformer import TransformerBlock
from mmattn.storage.json_files import parse_errors
from mmattn.storage.safetensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import Cache

T = TypeVar("T")
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
        self.settings: dict[str, object] = {
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
        self.dim, self.num_heads, self.positions, self.max_length = dim, num_heads, positions, max_length
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
        _check_ids("source", source, mask, table.num_embeddings, source.shape[-1], self._limit)
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
            cache: of transformers, with K/V of the n tokens before these; those of these are appended.

        Raises:
            ShapeError: sizes that do not fit, no token, an id outside the vocabulary, too many for learned positions.
            MaskError: a mask that is not bool.
        """
        before = 0 if cache is None else cache.get_seq_length()
        length = before + target.shape[-1]
        _check_ids("target", target, mask, self.target_embedding.num_embeddings, length, self._limit)
        if self.encoder:
            _check_memory(memory, len(target), self.dim, len(self.decoder))
        places = _places(target, mask, before)
        x = self._embed(target, self.target_embedding, self.target_positions, places)
        bias = self._bias(x, length, before)
        for number, block in enumerate(self.decoder):
            read: dict[str, object] = {}
            if self.encoder and isinstance(memory, Memory):
                read = {"memory": memory.tokens, "memory_mask": memory.mask}
            elif self.encoder:
                read = {"memory": memory[number]}
            update = None if cache is None else partial(cache.update, layer_idx=number)
            x = block(x, mask=mask, positions=places, bias=bias, cache=update, **read)
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
        cache: bool = True,
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
            cache: False computes K/V of the target again at each step.

        Raises:
            ShapeError: as `forward`, or `prefix` does not fit the source or `max_length`.
            MaskError: a mask that is not bool.
            ConfigError: a number outside its range, or more beams than the vocabulary has tokens besides the end.
        """
        from transformers import DynamicCache

        begin = torch.full((len(source), 1), check_int("start", start, at_least=0), device=source.device)
        tokens = begin if prefix is None else prefix
        longest = check_int("max_length", max_length)
        if tokens.dim() != 2 or len(tokens) != len(source) or not 0 < tokens.shape[1] <= longest:
            raise ShapeError(
                f"prefix must be (b, n) with b = {len(source)} and n at most max_length = {longest}, got "
                f"{tuple(tokens.shape)}"
            )
        if self.positions == "learned" and longest > self.max_length:
            raise ShapeError(f"max_length may be {self.max_length}, the learned positions there are; got {longest}")
        check_int("beams", beams, at_most=self.target_embedding.num_embeddings - 1)
        check_int("end", end, at_least=0, at_most=self.target_embedding.num_embeddings - 1)
        check_float("length_penalty", length_penalty)
        memory, past = self.prepare(self.encode(source, mask)), DynamicCache() if cache else None

        def step(tokens: Tensor) -> Tensor:
            new = tokens if past is None else tokens[:, past.get_seq_length() :]
            return self.decode(new, memory, cache=past)[:, -1]

        def reorder(rows: Sequence[int]) -> None:
            if past is not None:
                past.reorder_cache(torch.tensor(rows, dtype=torch.long, device=source.device))

        if beams == 1:
            return greedy(step, tokens, end=end, max_length=longest)
        return beam_search(
            step, reorder, tokens, end=end, max_length=longest, beams=beams, length_penalty=length_penalty
        )

    def attentions(self) -> dict[tuple[str, int], CrossAttention]:
        """The cross-attention of each decoder layer, by ("source", layer): what `mmattn.inspect.record` records."""
        blocks = enumerate(block for block in self.decoder if isinstance(block, TransformerBlock))
        return {("source", layer): block.cross_attention for layer, block in blocks if block.cross_attention}

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
        with parse_errors(path, "model whose weights are those of its settings"):
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
        return alibi(self.num_heads, x.shape[1], m, offset).to(x) if self.positions == "alibi" else None


def _check_memory(memory: Memory | Sequence[KeyValue], rows: int, dim: int, layers: int) -> None:
    """Refuse a memory that does not fit a target."""
    if isinstance(memory, Memory):
        batch, fits, got = memory.batch, memory.dim == dim, f"a memory of width {memory.dim}"
    else:
        batch = memory[0].batch if len(memory) else 0
        fits, got = len(memory) == layers, f"K/V of {len(memory)} layers"
    if not fits or (rows != batch and (batch == 0 or rows % batch)):
        raise ShapeError(
            f"a target of {rows} rows needs a memory of as many rows or a divisor, of width {dim} or prepared for "
            f"{layers} layers; got {got} and {batch} rows"
        )


def _check_ids(name: str, ids: Tensor, mask: Tensor | None, vocabulary: int, length: int, limit: int | None) -> None:
    """Refuse ids (b, ·) that are no text of a length, cached tokens included."""
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"{name} must be (b, l) ids, int64 or int32; got {tuple(ids.shape)} {ids.dtype}")
    if not ids.shape[1]:
        raise ShapeError(f"the {name} is empty, {tuple(ids.shape)}: give each row a token at least")
    if mask is not None and check_bool_mask(f"{name}_mask", mask).shape != (len(ids), length):
        raise ShapeError(f"{name}_mask must be {(len(ids), length)}, got {tuple(mask.shape)}")
    if limit is not None and length > limit:
        raise ShapeError(
            f"the {name} has {length} tokens and there are {limit} learned positions: cut it, or use another max_length"
        )
    if not may_read(ids) or not len(ids):
        return
    if mask is not None and not bool(mask.any(1).all()):
        raise ShapeError(f"row {int((~mask.any(1)).nonzero()[0])} of the {name} has no token, only padding")
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= vocabulary:
        raise ShapeError(
            f"ids of the {name} must lie in 0…{vocabulary - 1}, got {low}…{high}: they come from another tokenizer"
        )


def _if(condition: bool, kind: Callable[..., T], *arguments: object) -> T | None:
    return kind(*arguments) if condition else None


def _places(ids: Tensor, mask: Tensor | None, before: int) -> Tensor:
    """Positions of the tokens (b, l) after `before` cached ones: (l,), or (b, l) where there is padding."""
    length = ids.shape[1]
    if mask is None:
        return torch.arange(before, before + length, device=ids.device)
    return token_positions(mask)[:, -length:]
