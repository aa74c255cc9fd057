"""Encoder–decoder transformers trained from scratch on the attention core."""

from mmattn.seq2seq.encoder_decoder import EncoderDecoder

__all__ = ["EncoderDecoder"]
