"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmattn import training


class DataSettings(training.Settings):
    train: int = Field(12_000, ge=200)  # training facts, of 43,000
    synthetic: int = Field(88_000, ge=0)  # synthetic entries in training
    ask: int = Field(300, ge=1)  # held-out questions for each size, half of them without an answer
    sizes: tuple[int, ...] = (100, 1000, 10_000)  # entries of the measured indexes
    small: int = 10_000  # largest index for the rows that attend to all entries
    per_query: int = Field(64, ge=2)  # entries that a token attends to, in each layer and head
    in_prompt: int = Field(6, ge=1)  # entries in the prompt of the language model alone
    absent: float = Field(0.4, ge=0, lt=1)  # share of training questions without an answer
    cache: str = "runs/cache"  # embeddings, by encoder and texts


class AdapterSettings(training.Settings):
    layers: list[int] | None = None
    every: int | None = 2
    num_heads: int = Field(4, ge=1)
    head_dim: int = Field(24, ge=1)
    feed_forward: float = Field(2.0, ge=0)
    null_slot: bool = True


class FactsAdapterSettings(AdapterSettings):
    score_mean: float = 0.9  # the cosine of question and title that adds nothing
    score_std: float = Field(0.05, gt=0)  # of the cosines, before the learned temperature


class DocsAdapterSettings(AdapterSettings):
    layers: list[int] | None = [3, 5]
    every: int | None = None
    head_dim: int = Field(40, ge=1)
    feed_forward: float = Field(0.0, ge=0)


class DocsSettings(training.Settings):
    chunk: int = Field(32, ge=2)  # tokens
    window: int = Field(8, ge=1)  # chunks
    neighbours: int = Field(4, ge=1)
    choice: int = Field(2, ge=1)  # in training, neighbours are drawn from this many times as many
    layer: int = Field(4, ge=0)  # layer of the language model whose states represent the text before a token
    max_steps: int = Field(150, ge=1)
    batch_size: int = Field(8, ge=1)  # windows
    rank: int = Field(128, ge=1)  # rank of the LoRA beside the adapter, which learns the kind of text
    adapter: DocsAdapterSettings = DocsAdapterSettings()


class OptimSettings(training.OptimSettings):
    max_steps: int = Field(700, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    gate_learning_rate: float | None = Field(3e-2, gt=0)
    weight_decay: float = Field(0.05, ge=0)


class Config(training.RunSettings):
    out: str = "runs/rag-facts"
    part: Literal["facts", "docs"] = "facts"
    lm: str = "assets/rag"
    controls: bool = True  # LoRA without memory; facts in the prompt
    data: DataSettings = DataSettings()
    adapter: FactsAdapterSettings = FactsAdapterSettings()
    optim: OptimSettings = OptimSettings()
    docs: DocsSettings = DocsSettings()
