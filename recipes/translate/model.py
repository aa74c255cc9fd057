"""An encoder–decoder transformer (arXiv 1706.03762) of the core's attention layers, as a model of transformers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from mmattn import CrossAttention, SelfAttention, positions


class TranslationConfig(PretrainedConfig):
    """Sizes of a `TranslationModel`; `positions` is the code of token positions."""

    model_type = "mmattn-translation"

    def __init__(
        self,
        vocab_size: int = 2000,
        dim: int = 192,
        num_heads: int = 6,
        layers: int = 3,
        feed_forward: float = 4.0,
        dropout: float = 0.2,
        positions: str = "rotary",
        max_positions: int = 60,
        cross_attention: bool = True,
        **settings: Any,
    ) -> None:
        self.vocab_size, self.dim, self.num_heads, self.layers = vocab_size, dim, num_heads, layers
        self.feed_forward, self.dropout, self.positions = feed_forward, dropout, positions
        self.max_positions, self.cross_attention = max_positions, cross_attention
        self.num_hidden_layers = layers  # the name that caches of transformers read
        super().__init__(**{**settings, "is_encoder_decoder": True})


class Block(nn.Module):
    """x (b, l, d) plus self-attention, cross-attention to a memory (b, m, d) and a feed-forward part, norms first."""

    def __init__(self, config: TranslationConfig, decoder: bool) -> None:
        super().__init__()
        dim, heads, hidden = config.dim, config.num_heads, int(config.feed_forward * config.dim)
        rotary = positions.Rotary(dim // heads) if config.positions == "rotary" else None
        self.self_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_attention = SelfAttention(dim, heads, causal=decoder, rotary=rotary)
        self.cross_norm = self.cross_attention = None
        if decoder and config.cross_attention:
            self.cross_norm, self.cross_attention = nn.LayerNorm(dim), CrossAttention(dim, dim, heads)
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None, **text: Any
    ) -> Tensor:
        """Return (b, l, d); `text` has the mask, positions, bias and cache of the self-attention."""
        x = x + self.dropout(self.self_attention(self.self_norm(x), **text))
        if self.cross_attention is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, mask=memory_mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Stack(nn.Module):
    """The blocks of the encoder or of the decoder, from ids (b, l) to hidden states (b, l, d)."""

    main_input_name = "input_ids"

    def __init__(self, config: TranslationConfig, embedding: nn.Embedding, decoder: bool) -> None:
        super().__init__()
        self.config, self.embedding = config, embedding
        learned = config.positions == "learned"
        self.learned = positions.Learned(config.max_positions, config.dim) if learned else None
        self.blocks = nn.ModuleList(Block(config, decoder) for _ in range(config.layers))
        self.norm, self.dropout = nn.LayerNorm(config.dim), nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Return the hidden states; padding comes after a text, and `cache` holds the tokens before these."""
        config, before = self.config, 0 if cache is None else cache.get_seq_length()
        end = before + input_ids.shape[1]
        places = torch.arange(before, end, device=input_ids.device)
        x = self.embedding(input_ids) * math.sqrt(config.dim)
        if config.positions == "sinusoidal":
            x = x + positions.sinusoidal(places, config.dim).to(x.dtype)
        if self.learned is not None:
            x = x + self.learned(places)
        text: dict[str, Any] = {"mask": None if attention_mask is None else attention_mask.bool()}
        text |= {"positions": places, "bias": None}
        if config.positions == "alibi":
            text["bias"] = positions.alibi(config.num_heads, input_ids.shape[1], end, before).to(x)
        x = self.dropout(x)
        for number, block in enumerate(self.blocks):
            if cache is not None:
                text["cache"] = partial(cache.self_attention_cache.update, layer_idx=number)
            x = block(x, memory, memory_mask, **text)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class NoEncoder(nn.Module):
    """In place of the encoder of a decoder without cross-attention: it reads nothing."""

    main_input_name = "input_ids"

    def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutput:
        """Return hidden states (b, m, 0)."""
        return BaseModelOutput(last_hidden_state=torch.zeros(*input_ids.shape, 0, device=input_ids.device))


class TranslationModel(PreTrainedModel, GenerationMixin):
    """From source ids (b, m) to the logits (b, l, v) of target ids (b, l); source and target share one embedding."""

    config_class = TranslationConfig
    main_input_name = "input_ids"

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.encoder = Stack(config, self.embedding, decoder=False) if config.cross_attention else NoEncoder()
        self.decoder = Stack(config, self.embedding, decoder=True)
        stacks = ("encoder", "decoder") if config.cross_attention else ("decoder",)
        self._tied_weights_keys = {f"{stack}.embedding.weight": "embedding.weight" for stack in stacks}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):  # the other layers keep the initial weights of torch and of the core
            nn.init.normal_(module.weight, std=self.config.dim**-0.5)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return the encoder, for `generate`."""
        return self.encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        cache: EncoderDecoderCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> Seq2SeqLMOutput:
        """Return the logits of the token after each target token, and the mean loss of `labels` (b, l), -100 ignored.

        `decoder_input_ids` are by default the labels after the start token.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask=attention_mask)
        if decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        mask = None if attention_mask is None else attention_mask.bool()
        memory = encoder_outputs.last_hidden_state
        hidden = self.decoder(decoder_input_ids, memory=memory, memory_mask=mask, cache=cache).last_hidden_state
        logits = F.linear(hidden, self.embedding.weight)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Seq2SeqLMOutput(loss=loss, logits=logits, cache=cache)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the start token and all labels but the last, padding for -100."""
        ids = labels.roll(1, 1).masked_fill(labels.roll(1, 1) == -100, self.config.pad_token_id)
        ids[:, 0] = self.config.decoder_start_token_id
        return ids

    def attentions(self) -> dict[tuple[str, int], CrossAttention]:
        """Return the cross-attention of each decoder block: `mmattn.inspect.record` records their weights."""
        blocks = enumerate(self.decoder.blocks)
        return {("source", layer): block.cross_attention for layer, block in blocks if block.cross_attention}
