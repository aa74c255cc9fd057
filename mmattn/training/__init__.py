"""Training: `AdapterTrainer`, rows and their memories, LoRA controls, losses, the folder of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.data.collators import MemoryCollator, RowCollator, augment_memory
    from mmattn.data.encoded import Encoding, drop_errors, encode_dataset, encoding_of
    from mmattn.data.readers import memory_kinds, read_rows
    from mmattn.data.rows import Row, make_row, stack_memories
    from mmattn.data.sampling import PairSampler, shuffle_memories, split_rows
    from mmattn.data.text_batches import TextBatch, bos_and_eos, collate, encode_texts, pack
    from mmattn.progress import tracked
    from mmattn.training.compare import (
        compare_runs,
        markdown_table,
        mean_and_spread,
        read_metrics,
        spread_table,
    )
    from mmattn.training.lora import add_lora, matched_lora
    from mmattn.training.losses import mean_nats, sum_nats, token_nats
    from mmattn.training.lower_layers import cached_hidden_states
    from mmattn.training.prompt_cache import PromptCache, cached_prompts
    from mmattn.training.run_folder import DryRunEnded, RunFolder, dry_run
    from mmattn.training.settings import OptimSettings, RunSettings, Settings
    from mmattn.training.trainer import AdapterTrainer, gradient_checkpointing, parameter_groups

__all__ = [
    "AdapterTrainer",
    "DryRunEnded",
    "Encoding",
    "MemoryCollator",
    "OptimSettings",
    "PairSampler",
    "PromptCache",
    "Row",
    "RowCollator",
    "RunFolder",
    "RunSettings",
    "Settings",
    "TextBatch",
    "add_lora",
    "augment_memory",
    "bos_and_eos",
    "cached_hidden_states",
    "cached_prompts",
    "collate",
    "compare_runs",
    "drop_errors",
    "dry_run",
    "encode_dataset",
    "encode_texts",
    "encoding_of",
    "gradient_checkpointing",
    "make_row",
    "markdown_table",
    "matched_lora",
    "mean_and_spread",
    "mean_nats",
    "memory_kinds",
    "pack",
    "parameter_groups",
    "read_metrics",
    "read_rows",
    "shuffle_memories",
    "split_rows",
    "spread_table",
    "stack_memories",
    "sum_nats",
    "token_nats",
    "tracked",
]


__getattr__, __dir__ = lazy_exports(__name__)
