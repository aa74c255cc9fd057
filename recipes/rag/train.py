"""Train adapters that answer from retrieved facts, and measure them: `mmattn train config.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

import mmattn
from mmattn import inspect, training

from .answering import adapter_settings, answer_batch, describe, learn, load_lm
from .entries import Entries
from .facts import UNKNOWN, Fact, load_facts, prompt
from .measure import Measure
from .settings import Config
from .tables import plot_bits, plot_sizes, table
from .train_docs import show, train_documents

Question = tuple[str, str, mmattn.Memory]
LESS = {"without null slot": {"null_slot": False}, "without size normalisation": {"length_norm": False}}


def main(settings: dict[str, Any]) -> Path:
    """Leave settings, metrics, adapter, plots and the table with its controls in the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path
    accelerator = training.make_accelerator(device=config.device)
    content = {"part": config.part, "seed": config.seed}
    content |= (train_facts if config.part == "facts" else train_documents)(config, run, accelerator)
    run.write_json("table.json", content)
    if config.part == "facts":
        plot_sizes(content["rows"], run.path / "sizes.png")
    else:
        plot_bits(content["rows"], run.path / "bits.png")
        show(config, run)
    text = table([content])
    run.write_text("table.md", text)
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
    describe(config, tokenizer).save(run.path / "adapter")
    entries.index(range(min(1000, held_out))).save(run.path / "index")
    rows += measure.rows("adapter, retrieved memory", model, "hits", run.path / "answers.json")
    inspect.save_traces(measure.traces(model), run.path)
    rows += measure.rows("adapter, shuffled memory", model, "shuffled")
    rows += measure.rows("adapter, no memory", model, None)
    parameters, _ = model.trainable_parameters()
    model.unload()
    if config.controls:
        for name, change in LESS.items():
            less = config.model_copy(update={"adapter": config.adapter.model_copy(update=change)})
            model, _ = train_adapter(less, lm, tokenizer, known, run, accelerator, name)
            rows += measure.rows(f"adapter {name}", model, "hits")
            model.unload()
        torch.manual_seed(config.seed)
        lora = training.matched_lora(lm, parameters)
        loss, batches = answer_loss(lora, tokenizer, sees=False), questions(config, known)
        learn(config, lora, loss, batches, config.optim.max_steps, "LoRA", run, accelerator)
        rows += measure.rows("LoRA, closed book", lora, None)
        lora.unload()
    return {"rows": rows, "seconds": seconds, "steps": config.optim.max_steps, "parameters": parameters}


def load_entries(config: Config) -> tuple[Entries, Entries, int]:
    """Facts to train on; what worlds are made of, the held-out facts first; and how many those are."""
    facts, held = load_facts(seed=config.seed)
    needed = max(config.data.sizes) + config.data.ask
    facts, held = some(facts, len(facts), config.seed), some(held, needed, config.seed)
    known, fill = facts[: config.data.train], facts[config.data.train :][: needed - len(held)]
    given = (mmattn.TextEncoder(), Path(config.data.cache), config.progress)
    return Entries.of(known, *given), Entries.of(held + fill, *given), len(held)


def some(facts: list[Fact], count: int, seed: int) -> list[Fact]:
    """At most so many facts in a random order of their keys, all facts of a key together."""
    keys = sorted({fact.key for fact in facts})
    Random(seed).shuffle(keys)
    place = {key: number for number, key in enumerate(keys)}
    return sorted(facts, key=lambda fact: place[fact.key])[:count]


def questions(config: Config, known: Entries) -> Iterator[list[Question]]:
    """Batches of questions, each with a small index in full, from which the answer may be missing."""
    random = Random(config.seed)
    while True:
        yield [question(config, known, random) for _ in range(config.optim.batch_size)]


def question(config: Config, known: Entries, random: Random) -> Question:
    """A question, its answer, and what is in view."""
    asked = random.randrange(len(known))
    absent = random.random() < config.data.absent
    size = random.randint(2, config.data.view)
    rows = random.sample(range(len(known)), size)
    if random.random() < 0.5:
        rows += known.kin[known.facts[asked].key]
    rows = [row for row in dict.fromkeys(rows) if row != asked][: size - 1 + absent]
    if not absent:
        rows.append(asked)
    random.shuffle(rows)
    scores = known.titles[rows] @ known.questions[asked]
    memory = mmattn.Memory(known.slots(rows)[None], scores=scores[None])
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
    label: str = "adapter",
) -> tuple[Any, float]:
    """Attach an adapter and teach it to answer from what is in view; seconds."""
    torch.manual_seed(config.seed)
    model = mmattn.attach(lm, adapter_settings(config, 2 * known.titles.shape[1]))
    loss, steps = answer_loss(model, tokenizer), config.optim.max_steps
    return model, learn(config, model, loss, questions(config, known), steps, label, run, accelerator)
