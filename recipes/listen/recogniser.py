"""The speech recogniser: a small Whisper of random weights, how it learns, what it writes, and how wrong that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

from .settings import RecogniserSettings
from .speech import END, START, VOCABULARY


class Learner(nn.Module):
    """A recogniser of random weights, with a second output of its encoder while it learns.

    The encoder alone also learns the words by CTC (arXiv 1609.06773): it soon finds where they are, and the decoder
    what follows what.

    Args:
        settings: of the recogniser.
        frames: of a clip.
        longest: tokens of a text at most.
    """

    def __init__(self, settings: RecogniserSettings, frames: int, longest: int) -> None:
        super().__init__()
        width = settings.width
        config = WhisperConfig(
            vocab_size=VOCABULARY, num_mel_bins=settings.bands, d_model=width,
            encoder_layers=settings.layers, decoder_layers=settings.layers,
            encoder_attention_heads=settings.heads, decoder_attention_heads=settings.heads,
            encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, dropout=settings.dropout,
            max_source_positions=(frames + 1) // 2, max_target_positions=longest,
            pad_token_id=END, bos_token_id=START, eos_token_id=END, decoder_start_token_id=START,
            suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        self.recogniser = WhisperForConditionalGeneration(config)
        self.heard = nn.Linear(width, VOCABULARY)
        self.weight = settings.ctc

    def forward(self, features: Tensor, read: Tensor, said: Tensor) -> Tensor:
        """The sum of the losses of all words.

        Args:
            features: (b, bands, frames).
            read: (b, l) ids that the decoder reads.
            said: (b, l) ids that follow, -100 after the end.
        """
        found = self.recogniser(input_features=features, decoder_input_ids=read)
        chances = self.heard(found.encoder_last_hidden_state).log_softmax(-1).transpose(0, 1)
        lengths = (said >= 0).sum(1) - 1
        words = torch.cat([row[:length] for row, length in zip(said, lengths.tolist(), strict=True)])
        whole = torch.full_like(lengths, len(chances))
        ctc = F.ctc_loss(chances, words, whole, lengths, blank=START, reduction="sum", zero_infinity=True)
        return text_loss(found.logits, said) + self.weight * ctc


def text_loss(logits: Tensor, said: Tensor) -> Tensor:
    """The sum of the cross-entropies of what is said (b, l), -100 aside."""
    return F.cross_entropy(logits.flatten(0, 1), said.flatten(), ignore_index=-100, reduction="sum")


@torch.no_grad()
def transcribe(model: Any, features: Tensor, longest: int, **beside: Any) -> list[list[int]]:
    """The words of each row, greedily.

    Args:
        model: the recogniser, adapted or not.
        features: (b, bands, frames).
        longest: words at most.
        beside: what else the model is given.
    """
    heard = model.get_encoder()(features)
    ids = torch.full((len(features), 1), START, device=features.device)
    for _ in range(longest):
        logits = model(encoder_outputs=heard, decoder_input_ids=ids, **beside).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return [[*row, END][: [*row, END].index(END)] for row in ids[:, 1:].tolist()]


def word_errors(said: Sequence[int], right: Sequence[int]) -> int:
    """Substitutions, insertions and deletions: the Levenshtein distance of two texts.

    >>> word_errors([1, 2, 3, 4], [1, 3, 5])
    2
    """
    costs = [*range(len(right) + 1)]
    for row, word in enumerate(said, start=1):
        before, costs[0] = costs[0], row
        for column, other in enumerate(right, start=1):
            best = min(before + (word != other), costs[column] + 1, costs[column - 1] + 1)
            before, costs[column] = costs[column], best
    return costs[-1]
