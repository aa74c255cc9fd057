"""Train adapters that answer from retrieved facts, and measure them: `mmattn train config.yaml`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

import mmattn
from mmattn import inspect, training
from mmattn.encoders import HybridEncoder
from mmattn.errors import import_extra

from .answering import adapter_settings, answer_batch, describe, learn, load_lm
from .entries import Entries
from .facts import UNKNOWN, Fact, load_facts, made_up, prompt
from .measure import Measure
from .settings import Config
from .tables import plot_bits, plot_sizes, table
from .train_docs import show, train_documents
from .train_tokens import train_tokens

Question = tuple[str, str, mmattn.Memory]


def main(settings: dict[str, Any]) -> Path:
    """Leave settings, metrics, adapter, plots and the table with its controls in the run's folder."""
    config = Config(**settings)
    import_extra("matplotlib", "viz")  # rather missed now than after the last step
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path
    accelerator = training.make_accelerator(device=config.device)
    content = {"part": config.part, "seed": config.seed}
    content |= PARTS[config.part](config, run, accelerator)
    run.write_json("table.json", content)
    if config.part == "facts":
        plot_sizes(content["rows"], run.path / "sizes.png")
    else:
        plot_bits(content["rows"], run.path / "bits.png")
    if config.part == "docs":
        show(config, run)
    text = table([content])
    run.write_text("table.md", text)
    if config.part != "tokens":  # whose adapter searches as it reads, which no pipeline does
        told = mmattn.pipelines.PipelineConfig.load(run.path / "adapter")
        told.model_copy(update={"results": text}).save(run.path / "adapter")
    print(text)
    return run.path


def train_facts(config: Config, run: training.RunFolder, accelerator: Any) -> dict[str, Any]:
    """Every row of the table of answers, and what the training took."""
    lm, tokenizer = load_lm(config.lm, accelerator.device)
    known, entries, held_out = load_entries(config)
    measure = Measure(config, tokenizer, entries, held_out)
    rows = [*measure.rows("closed book, frozen LM", lm, None)]
    if config.controls:
        rows += measure.rows("facts in the prompt, frozen LM", lm, "prompt")
        rows += measure.rows("kNN-LM, frozen LM", lm, "knn")
    model, seconds = train_adapter(config, lm, tokenizer, known, run, accelerator)
    model.save_adapter(run.path / "adapter", encoder=entries.encoder.fingerprint)
    entries.encoder.save(run.path / "adapter" / "encoder.safetensors")
    describe(config, tokenizer).save(run.path / "adapter")
    entries.index(range(min(1000, held_out))).save(run.path / "index")
    rows += measure.rows("adapter, index searched by attention", model, "index", run.path / "answers.json")
    inspect.save_traces(measure.traces(model), run.path)
    rows += measure.rows("adapter, attention to all entries", model, "all")
    rows += measure.rows("adapter, retrieved entries", model, "hits")
    rows += measure.rows("adapter, entries of another question", model, "shuffled")
    rows += measure.rows("adapter, random entries", model, "random")
    rows += measure.rows("adapter, no memory", model, None)
    parameters, _ = model.trainable_parameters()
    model.unload()
    if config.controls:
        torch.manual_seed(config.seed)
        lora = training.matched_lora(lm, parameters)
        loss, batches = answer_loss(lora, tokenizer, sees=False), questions(config, known)
        learn(config, lora, loss, batches, config.optim.max_steps, "LoRA", run, accelerator)
        rows += measure.rows("LoRA, closed book", lora, None)
        lora.unload()
    return {"rows": rows, "seconds": seconds, "steps": config.optim.max_steps, "parameters": parameters}


PARTS = {"facts": train_facts, "docs": train_documents, "tokens": train_tokens}


def load_entries(config: Config) -> tuple[Entries, Entries, int]:
    """Facts to train on; what worlds are made of, the held-out facts first; and how many those are.

    Facts to train on come before the others that fill indexes in training. What fills worlds are facts that training
    does not see, and after them made-up ones. Both sides have an encoder whose queries are fitted to the former.
    """
    (facts, held), data = load_facts(), config.data
    names = facts + held
    facts, held = some(facts, len(facts), 0), some(held, len(held), 0)
    known = facts[: data.train]
    needed = max(data.sizes) + data.ask
    worlds = (held + facts[data.train :])[:needed]
    encoder, given = HybridEncoder(), (Path(data.cache), config.progress)
    kept = Entries.of(known + made_up(known, data.made_up), len(known), encoder, *given)
    worlds += made_up(names, needed - len(worlds))
    entries = Entries.of(worlds, len(held), encoder, *given)
    encoder.fit_queries(kept.questions, kept.titles[: len(known)])
    for one in (kept, entries):
        one.questions = encoder.project_queries(one.questions)
    return kept, entries, min(len(held), needed)


def some(facts: list[Fact], count: int, seed: int) -> list[Fact]:
    """At most so many facts in a random order of their keys, all facts of a key together."""
    keys = sorted({fact.key for fact in facts})
    Random(seed).shuffle(keys)
    place = {key: number for number, key in enumerate(keys)}
    return sorted(facts, key=lambda fact: place[fact.key])[:count]


def questions(config: Config, known: Entries) -> Iterator[list[Question]]:
    """Batches of questions, each with the entries of an index of some size that are most like it.

    Sizes are drawn up to the number of entries, all powers alike; other facts about the key are often among them, and
    the answer may be missing.
    """
    random = torch.Generator().manual_seed(config.seed)
    data, total = config.data, len(known)
    while True:
        asked = torch.randint(len(known.questions), (config.optim.batch_size,), generator=random)
        sizes = torch.exp(torch.rand(len(asked), generator=random) * math.log(total / 2)) * 2
        absent, kin = torch.rand(2, len(asked), generator=random) < torch.tensor([[data.absent], [0.7]])
        there = torch.rand(len(asked), total, generator=random) < (sizes / total)[:, None]
        for row, one in enumerate(asked.tolist()):
            there[row, known.kin[known.facts[one].key]] |= kin[row]
            there[row, one] = not absent[row]
        scores = known.questions[asked] @ known.titles.T
        best = scores.masked_fill(~there, -torch.inf).topk(data.per_query)
        yield [
            question(known, int(one), bool(absent[row]), best.indices[row][best.values[row] > -torch.inf])
            for row, one in enumerate(asked)
        ]


def question(known: Entries, asked: int, absent: bool, rows: torch.Tensor) -> Question:
    """A question, its answer, and the entries in view; one at random where there are none."""
    rows = rows if len(rows) else torch.tensor([(asked + 1) % len(known)])
    memory = mmattn.Memory(known.slots(rows)[None], scores=(known.titles[rows] @ known.questions[asked])[None])
    return prompt(known.facts[asked]), UNKNOWN if absent else known.facts[asked].value, memory


def answer_loss(model: Any, tokenizer: Any, sees: bool = True) -> training.Loss:
    """Minus log p of the answers, after the questions and with what is in view."""

    def loss(rows: Sequence[Question], seeds: Sequence[int]) -> tuple[torch.Tensor, int]:
        prompts, answers, memories = zip(*rows, strict=True)
        batch = answer_batch(tokenizer, prompts, answers, mmattn.Memory.stack(memories) if sees else None)
        return training.sum_nats(model, batch.to(next(model.parameters()).device))

    return loss


def train_adapter(
    config: Config,
    lm: Any,
    tokenizer: Any,
    known: Entries,
    run: training.RunFolder,
    accelerator: Any,
) -> tuple[Any, float]:
    """Attach an adapter and teach it to answer from what is in view; seconds."""
    torch.manual_seed(config.seed)
    model = mmattn.attach(lm, adapter_settings(config, 2 * known.titles.shape[1]))
    loss, steps = answer_loss(model, tokenizer), config.optim.max_steps
    return model, learn(config, model, loss, questions(config, known), steps, "adapter", run, accelerator)
