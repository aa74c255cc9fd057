"""Encoder–decoder transformers trained from scratch on the attention core."""

from mmattn.core.paged_cache import PagedCache, PagePool
from mmattn.core.text_cache import GrowingCache
from mmattn.core.transformer import TransformerBlock
from mmattn.seq2seq.encoder_decoder import EncoderDecoder

__all__ = ["EncoderDecoder", "GrowingCache", "PagePool", "PagedCache", "TransformerBlock"]
