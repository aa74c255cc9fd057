"""Training: rows and their memories, loops, checkpoints, the text-only control, scores, the run's folder."""

from __future__ import annotations

from typing import Any

from mmattn.progress import tracked
from mmattn.training.captions import PairOrder, TextBatch, begin_and_end, check_prompt, collate, disturb, encode_texts
from mmattn.training.checkpoints import last_step
from mmattn.training.collator import RowCollator
from mmattn.training.controls import add_lora, load_lora, matched_lora, ranks_for
from mmattn.training.loop import Fitted, fit, parameter_groups
from mmattn.training.memories import RowMemories
from mmattn.training.order import LengthOrder, RowBatches, seed_of
from mmattn.training.plan import Tuned, Tuning
from mmattn.training.processes import Metrics, finish, make_accelerator
from mmattn.training.recompute import recomputed
from mmattn.training.rows import Row, make_row, read_folder, read_lines
from mmattn.training.runs import RunFolder, markdown_table
from mmattn.training.scores import mean_nats, perplexity, sum_nats, text_nats, token_nats
from mmattn.training.seeds import mean_and_spread, spread_table
from mmattn.training.sources import DatasetRows, StreamRows, read_rows, split_rows
from mmattn.training.tuning import mean_loss, tune

__all__ = [
    "AdapterTrainer",
    "DatasetRows",
    "Fitted",
    "LengthOrder",
    "Metrics",
    "PairOrder",
    "Row",
    "RowBatches",
    "RowCollator",
    "RowMemories",
    "RunFolder",
    "StreamRows",
    "TextBatch",
    "Tuned",
    "Tuning",
    "add_lora",
    "begin_and_end",
    "check_prompt",
    "collate",
    "disturb",
    "encode_texts",
    "finish",
    "fit",
    "last_step",
    "load_lora",
    "make_accelerator",
    "make_row",
    "markdown_table",
    "matched_lora",
    "mean_and_spread",
    "mean_loss",
    "mean_nats",
    "parameter_groups",
    "perplexity",
    "ranks_for",
    "read_folder",
    "read_lines",
    "read_rows",
    "recomputed",
    "seed_of",
    "split_rows",
    "spread_table",
    "sum_nats",
    "text_nats",
    "token_nats",
    "tracked",
    "tune",
]


def __getattr__(name: str) -> Any:
    # TensorCache when it is first asked for: its class is one of transformers'.
    if name == "AdapterTrainer":
        from mmattn.training.trainer import adapter_trainer

        return adapter_trainer()
    raise AttributeError(f"module 'mmattn.training' has no attribute {name!r}")
