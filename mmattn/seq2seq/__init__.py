"""Encoder–decoder transformers trained from scratch on the attention core."""

from mmattn.seq2seq.encoder_decoder import EncoderDecoder
from mmattn.seq2seq.transformer import TransformerBlock

__all__ = ["EncoderDecoder", "TransformerBlock"]
