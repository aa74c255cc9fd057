"""Encoder–decoder transformers trained from scratch on the attention core."""

from mmattn.core.growing import GrowingCache
from mmattn.core.paged import PagedCache, PagePool
from mmattn.core.transformer import TransformerBlock
from mmattn.seq2seq.encoder_decoder import EncoderDecoder

__all__ = ["EncoderDecoder", "GrowingCache", "PagePool", "PagedCache", "TransformerBlock"]
