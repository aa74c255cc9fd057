"""Pieces of a training run: pairs of text and memory, the loop, scores, the text-only control, the run's folder."""

from __future__ import annotations

from mmattn.progress import tracked
from mmattn.training.captions import PairOrder, TextBatch, begin_and_end, check_prompt, collate, disturb, encode_texts
from mmattn.training.controls import matched_lora, ranks_for
from mmattn.training.loop import Fitted, fit, parameter_groups
from mmattn.training.runs import RunFolder, markdown_table
from mmattn.training.scores import mean_nats, perplexity, text_nats, token_nats
from mmattn.training.seeds import mean_and_spread, spread_table

__all__ = [
    "Fitted",
    "PairOrder",
    "RunFolder",
    "TextBatch",
    "begin_and_end",
    "check_prompt",
    "collate",
    "disturb",
    "encode_texts",
    "fit",
    "markdown_table",
    "matched_lora",
    "mean_and_spread",
    "mean_nats",
    "parameter_groups",
    "perplexity",
    "ranks_for",
    "spread_table",
    "text_nats",
    "token_nats",
    "tracked",
]
