"""Which way to give a model a memory is best for what? Train each, with its controls: `mmattn train config.yaml`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import training

from .cost import costs
from .documents import COLUMNS as DOCUMENT_COLUMNS, Documents
from .learning import learn
from .pictures import Pictures
from .reader import load_lm, train_reader
from .settings import Config
from .texts import Texts
from .ways import Alone, Passages, Prefix, Prompt, Way, prefix

COLUMNS = {
    "accuracy": ("right", 100, ".1f", " %"),
    "shuffled": ("right, another's memory", 100, ".1f", " %"),
    "bits": ("bits saved", 1, "+.2f", ""),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds", 1, ".0f", ""),
    "first_ms": ("first token, ms", 1, ".1f", ""),
    "token_ms": ("further token, ms", 1, ".1f", ""),
    "kilobytes": ("kB of a memory", 1, ",.0f", ""),
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
    """Leave settings, metrics and the table with its controls in the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path
    accelerator = training.make_accelerator(device=config.device)
    if config.task == "documents":
        documents = Documents(config, run, accelerator)
        content = {"rows": documents.rows(), "tokens": documents.ids.shape[1]}
    elif config.task == "reader":
        content = train_reader(config, run, accelerator)
    else:
        content = Study(config, run, accelerator).table()
    content |= {"seed": config.seed, "task": config.task}
    run.write_json("table.json", content)
    text = table([content])
    run.write_text("table.md", text)
    print(text)
    return run.path


class Study:
    """One task, and every way to do it."""

    def __init__(self, config: Config, run: training.RunFolder, accelerator: Any) -> None:
        self.config, self.run, self.accelerator = config, run, accelerator
        device = accelerator.device
        self.task: Pictures | Texts
        if config.task == "pictures":
            self.task = Pictures(config, device)
        else:
            self.task = Texts(config, *load_lm(config, device))
        torch.manual_seed(config.seed)

    def table(self) -> dict[str, Any]:
        """Every row, and what is said under the table."""
        makers, count = self.makers(), self.config.parameters
        for make in makers.values():  # what cannot be is said before anything is trained
            make(self.task.lm, count).close()
        spent = costs(
            {name: lambda lm, make=make: make(lm, 0) for name, make in makers.items()},
            self.task.lm,
            *self.task.request(),
        )
        rows = [self.row("no memory", lambda lm, _: Alone(lm, None, 0)), self.row("LoRA, no memory", _lora, count)]
        untrained: dict[str, Make] = {}
        if self.config.task != "pictures":
            untrained = {"in the prompt": lambda lm, n: Prompt(lm, None, n)}
        if "passages" in makers:
            untrained |= {
                "passages read before": makers["passages"],
                "passages read before, keys not turned": lambda lm, n: Passages(lm, n, turned=False),
            }
        if "again" in makers:
            untrained["passages, first tokens read again"] = makers["again"]
        for name, make in untrained.items():
            rows.append(self.row(name, make) | spent.get(name, {}))
        if untrained:
            rows.append(self.row("in the prompt, tuned as long", untrained["in the prompt"], count))
        for way, make in makers.items():
            if way in NAMES:
                rows.append(self.row(NAMES[way], make, count) | spent[way])
        control = rows[1]["nats"]
        for row in rows:
            nats = row.pop("nats")
            row["bits"] = sum(b - a for a, b in zip(nats, control, strict=True)) / len(nats) / math.log(2)
        return {"rows": rows, "slots": self.task.slots, "bound": self.task.bound()}

    def makers(self) -> dict[str, Make]:
        """What makes each way, of a language model and a number of parameters to train."""
        dim, config = self.task.memory_dim, self.config
        makers: dict[str, Make] = {
            "gated": lambda lm, n: Way(lm, mmattn.GatedAdapter(dim, **config.gated), n),
            "inserted": lambda lm, n: Way(lm, mmattn.adapters.InsertedAdapter(dim), n),
            "joined": lambda lm, n: Way(lm, mmattn.adapters.JoinedAdapter(dim, **config.joined), n),
            "prefix": lambda lm, n: Prefix(lm, prefix(lm, n or config.parameters), n),
            "passages": lambda lm, n: Passages(lm, n),
        }
        if self.config.task == "pictures":
            del makers["passages"]  # nothing that a language model could read
        chosen = {way: make for way, make in makers.items() if way in self.config.ways}
        if self.config.task != "pictures":
            again = config.texts.recomputed_tokens
            if "passages" in chosen and again:
                chosen["again"] = lambda lm, n: Passages(lm, n, recomputed_tokens=again)
            chosen["in the prompt"] = lambda lm, n: Prompt(lm, None, n)
        return chosen

    def row(self, name: str, make: Make, parameters: int = 0) -> dict[str, Any]:
        """Train a way, where it has parameters, and measure it."""
        torch.manual_seed(self.config.seed)
        way, task = make(self.task.lm, parameters), self.task
        seconds = None
        if parameters:
            seconds = learn(
                way, name, task.batches(), task.batch, self.config.optim, self.config.seed, self.run, self.accelerator,
                self.config.progress,
            )  # fmt: skip
        reads = way.memory(task.held_out[[0]]) is not None or isinstance(way, (Prompt, Passages))
        found = task.score(way, task.held_out if reads else None)
        shuffled = task.score(way, task.shuffled)["accuracy"] if reads else None
        trained = way.parameters if parameters else None
        way.close()
        row = dict.fromkeys(COLUMNS) | {"name": name, "shuffled": shuffled, "parameters": trained, "seconds": seconds}
        return row | found


def _lora(lm: Any, parameters: int) -> Way:
    return Alone(lm, None, parameters)


def table(contents: list[dict[str, Any]]) -> str:
    """The rows of one or several `table.json`, and how to read them."""
    first = contents[0]
    if first["task"] == "documents":
        made = training.spread_table("", DOCUMENT_COLUMNS, [one["rows"] for one in contents])
        return f"{made}\n\nDocuments of {first['tokens']} tokens; every question about each is asked."
    if first["task"] == "reader":
        made = training.spread_table("", {"accuracy": COLUMNS["accuracy"]}, [one["rows"] for one in contents])
        return f"{made}\n\n{first['parameters']:,} parameters, {first['seconds']:.0f} s."
    made = training.spread_table("", COLUMNS, [one["rows"] for one in contents])
    asked = "descriptions" if first["task"] == "pictures" else "answers"
    return (
        f"{made}\n\n{first['slots']} slots in a memory; bits saved of {first['bound']:.2f} against the LoRA without a "
        f"memory, mean over {asked}; milliseconds and bytes of one request whose memory is prepared."
    )
