"""Ways to give a language model a memory, trained and measured with their controls: `mmattn train config.yaml`.

`Study` compares them on one task; `train_reader` makes the language model of the texts; `Documents` trains prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn import training

from .documents import COLUMNS as DOCUMENT_COLUMNS, Documents
from .pictures import Pictures
from .reader import load_lm, train_batches, train_reader
from .settings import Config
from .texts import Texts
from .ways import NoMemory, Passages, Prefix, Prompt, Way, prefix

COLUMNS = {
    "accuracy": ("right", 100, ".1f", " %"),
    "shuffled": ("right, another's memory", 100, ".1f", " %"),
    "bits": ("bits saved", 1, "+.2f", ""),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds", 1, ".0f", ""),
}
NAMES = {
    "gated": "gated cross-attention",
    "inserted": "inserted tokens",
    "joined": "joined in the model's own attention",
    "prefix": "a trained prefix",
    "passages": "passages read before, block-tuned",
    "again": "passages, first tokens read again, block-tuned",
}
Make = Callable[[Any, int], Way]


def main(settings: dict[str, Any]) -> Path:
    """Run with these settings (see settings.py) and return the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path
    device = config.optim.arguments(config).device
    if config.task == "documents":
        documents = Documents(config, run, device)
        content = {"rows": documents.rows(), "tokens": documents.ids.shape[1]}
    elif config.task == "reader":
        content = train_reader(config, run, device)
    else:
        content = Study(config, run, device).table()
    content |= {"seed": config.seed, "task": config.task}
    run.finish(content, table)
    return run.path


class Study:
    """One task, and every way to do it."""

    def __init__(self, config: Config, run: training.RunFolder, device: torch.device) -> None:
        self.config, self.run = config, run
        self.task: Pictures | Texts
        if config.task == "pictures":
            self.task = Pictures(config, device)
        else:
            self.task = Texts(config, *load_lm(config, device))
        torch.manual_seed(config.seed)

    def table(self) -> dict[str, Any]:
        """Return every row, and the figures below the table."""
        makers, count = self.makers(), self.config.parameters
        for make in makers.values():  # fail now rather than after the first training
            make(self.task.lm, count).close()
        rows = [
            self.row("no memory", lambda lm, _: NoMemory(lm, None, 0)),
            self.row("LoRA, no memory", lambda lm, n: NoMemory(lm, None, n), count),
        ]
        untrained: dict[str, Make] = {}
        if self.config.task != "pictures":
            untrained = {"in the prompt": lambda lm, n: Prompt(lm, None, n)}
        if "passages" in makers:
            untrained["passages read before"] = makers["passages"]
        if "again" in makers:
            untrained["passages, first tokens read again"] = makers["again"]
        rows += [self.row(name, make) for name, make in untrained.items()]
        if untrained:
            rows.append(self.row("in the prompt, tuned as long", untrained["in the prompt"], count))
        rows += [self.row(NAMES[way], make, count) for way, make in makers.items()]
        control = rows[1]["nats"]
        for row in rows:
            nats = row.pop("nats")
            row["bits"] = sum(b - a for a, b in zip(nats, control, strict=True)) / len(nats) / math.log(2)
        return {"rows": rows, "slots": self.task.slots, "bound": self.task.bound()}

    def makers(self) -> dict[str, Make]:
        """Return a function for each way, from a language model and a number of trained parameters."""
        dim, config = self.task.memory_dim, self.config
        makers: dict[str, Make] = {
            "gated": lambda lm, n: Way(lm, mmattn.GatedAdapter(dim, **config.gated), n),
            "inserted": lambda lm, n: Way(lm, mmattn.adapters.InsertedAdapter(dim), n),
            "joined": lambda lm, n: Way(lm, mmattn.adapters.JoinedAdapter(dim, **config.joined), n),
            "prefix": lambda lm, n: Prefix(lm, prefix(lm, n or config.parameters), n),
            "passages": lambda lm, n: Passages(lm, n),
        }
        if self.config.task == "pictures":
            del makers["passages"]  # pictures have no tokens
        chosen = {way: make for way, make in makers.items() if way in self.config.ways}
        if self.config.task != "pictures":
            again = config.texts.recomputed_tokens
            if "passages" in chosen and again:
                chosen["again"] = lambda lm, n: Passages(lm, n, recomputed_tokens=again)
        return chosen

    def row(self, name: str, make: Make, parameters: int = 0) -> dict[str, Any]:
        """Train a way, if it has parameters, and measure it."""
        torch.manual_seed(self.config.seed)
        way, task = make(self.task.lm, parameters), self.task
        seconds = None
        if parameters:
            seconds = self.train(way, name)
        reads = way.memory(task.held_out[[0]]) is not None or isinstance(way, (Prompt, Passages))
        scores = task.score(way, task.held_out if reads else None)
        shuffled = task.score(way, task.shuffled)["accuracy"] if reads else None
        trained = way.parameters if parameters else None
        way.close()
        row = dict.fromkeys(COLUMNS) | {"name": name, "shuffled": shuffled, "parameters": trained, "seconds": seconds}
        return row | scores

    def train(self, way: Way, label: str) -> float:
        """Train the adapter of a way and the LoRA beside it, and return the seconds."""
        optim, lora_alone = self.config.optim, isinstance(way, (NoMemory, Prompt, Passages))

        def loss(rows: Sequence[Any]) -> tuple[Tensor, int]:
            batch = self.task.batch(rows)
            return way.nats(batch, batch.memories).sum(), int((batch.labels[:, 1:] != -100).sum())

        return train_batches(
            way.model,
            loss,
            iter(self.task.batches()),
            self.config,
            self.run,
            label,
            optim.gate_learning_rate,
            learning_rate=optim.lora_learning_rate if lora_alone else optim.learning_rate,
            warmup_steps=min(optim.warmup_steps, optim.max_steps // 2),
        )


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`, with its legend."""
    first = contents[0]
    if first["task"] == "documents":
        text = training.spread_table("", DOCUMENT_COLUMNS, [one["rows"] for one in contents])
        return f"{text}\n\nDocuments of {first['tokens']} tokens; every question about each is asked."
    if first["task"] == "reader":
        text = training.spread_table("", {"accuracy": COLUMNS["accuracy"]}, [one["rows"] for one in contents])
        seconds = f", {first['seconds']:.0f} s" if "seconds" in first else ""
        return f"{text}\n\n{first['parameters']:,} parameters{seconds}."
    text = training.spread_table("", COLUMNS, [one["rows"] for one in contents])
    unit = "descriptions" if first["task"] == "pictures" else "answers"
    return (
        f"{text}\n\n{first['slots']} slots in a memory; bits saved of {first['bound']:.2f} against the LoRA without a "
        f"memory, mean over {unit}."
    )
