"""Encoder–decoder models from scratch, built on the attention core."""

from mmattn.seq2seq.encoder_decoder import EncoderDecoder

__all__ = ["EncoderDecoder"]
