"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mmattn import training


class TextSettings(training.Settings):
    passages: int = Field(8, ge=1)  # of a request
    statements: int = Field(15, ge=1)  # of a passage
    entries: int = Field(64, ge=2)  # task facts: statements of a request, each an entry
    ask: int = Field(24, ge=1)  # questions to a request
    requests: int = Field(60, ge=1)  # when measured
    recomputed_tokens: int = Field(16, ge=0)  # first tokens of each passage to read again in further rows; 0: no rows
    lm: str = "runs/ways-reader/lm"  # a folder or a name on the hub: the language model that reads


class DocumentSettings(training.Settings):
    documents: int = Field(8, ge=2)
    statements: int = Field(60, ge=2)  # of each
    times_fewer: int = Field(20, ge=1)  # tokens of a document per slot of its prefix


class ReaderSettings(training.Settings):
    lm: str | None = None  # a pretrained language model to measure; None trains one
    width: int = Field(128, ge=8)
    depth: int = Field(3, ge=2)
    heads: int = Field(4, ge=2)
    max_steps: int = Field(4000, ge=1)
    tokens: int = Field(2560, ge=256)  # of a batch
    learning_rate: float = Field(2e-3, gt=0)


class OptimSettings(training.OptimSettings):
    max_steps: int = Field(800, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    lora_learning_rate: float = Field(2e-3, gt=0)  # for ways that train only a LoRA
    gate_learning_rate: float | None = Field(3e-2, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    warmup_steps: int = Field(30, ge=0)


class Config(training.RunSettings):
    out: str = "runs/ways"
    task: Literal["pictures", "facts", "passages", "documents", "reader"] = "passages"
    ways: tuple[Literal["gated", "inserted", "joined", "prefix", "passages"], ...] = (
        "gated", "inserted", "joined", "prefix", "passages",
    )  # fmt: skip
    parameters: int = Field(200_000, ge=1000)  # trained parameters of each way: its adapter, and a LoRA for the rest
    gated: dict[str, Any] = {"every": 1, "num_heads": 4, "head_dim": 16, "feed_forward": 0.0}  # of GatedAdapter
    joined: dict[str, Any] = {"every": 1, "gate": "head"}  # of JoinedAdapter
    vision: dict[str, Any] = {}  # task pictures: settings of the vision recipe
    texts: TextSettings = TextSettings()
    documents: DocumentSettings = DocumentSettings()
    reader: ReaderSettings = ReaderSettings()
    optim: OptimSettings = OptimSettings()
