"""Does a frozen language model answer from the hits of a search? Train an adapter on facts, and its controls.

    mmattn train config.yaml

Each question attends to entries of an index, one slot each. The other part of the recipe, chunks of documents, is in
train_docs.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

import mmattn
from mmattn import inspect, pipelines, training
from mmattn.encoders import NameEncoder

from .answering import Loss, answer_batch, load_lm, train as train_module
from .data import PROPERTIES, UNKNOWN, Entries, Fact, load_facts, prompt, synthetic
from .measure import Measure
from .settings import Config
from .train_docs import train_documents

FACTS = {
    "accuracy": ("answers right", 100, ".1f", " %"),
    "attended": ("right entry attended to most", 100, ".1f", " %"),
    "precision": ("refusals right", 100, ".1f", " %"),
    "recall": ("unanswerable refused", 100, ".1f", " %"),
}
DOCS = {
    "bits": ("bits per byte", 1, ".3f", ""),
    "against": ("against the LoRA of the same seed", 1, "+.4f", ""),
    "seconds": ("seconds of training", 1, ".0f", ""),
}
TRACES = 6  # answers that `mmattn explore` shows
Question = tuple[str, str, mmattn.Memory]


def main(settings: dict[str, Any]) -> Path:
    """Run a part of the recipe with these settings (see settings.py) and return the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path
    part = train_facts if config.part == "facts" else train_documents
    content = {"part": config.part, "seed": config.seed, **part(config, run)}
    results = run.finish(content, table)
    if config.part == "facts":
        pipeline_config = pipelines.PipelineConfig.load(run.path / "adapter")
        pipeline_config.model_copy(update={"results": results}).save(run.path / "adapter")
    return run.path


def train_facts(config: Config, run: training.RunFolder) -> dict[str, Any]:
    """Return every row of the table of answers, and the seconds of training."""
    # Data: facts with their vectors, and held-out questions over indexes of every size.
    device = config.optim.arguments(config).device
    lm, tokenizer = load_lm(config.lm, device)
    known, entries, held_out = load_entries(config)
    measure = Measure(config, tokenizer, entries, held_out)
    rows = measure.rows("closed book, frozen LM", lm, None)
    if config.controls:
        rows += measure.rows("facts in the prompt, frozen LM", lm, "prompt")

    # Model: a frozen language model with gated cross-attention, to whose scores the cosine of the search is added.
    torch.manual_seed(config.seed)
    width = 2 * known.titles.shape[1]
    model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=width, score_bias=True, **config.adapter.model_dump()))

    # Training.
    steps = config.optim.max_steps
    loss = answer_loss(model, tokenizer)
    seconds = train_module(config, model, loss, questions(config, known), steps, "adapter", run)
    model.save_adapter(run.path / "adapter", encoder=entries.encoder.fingerprint)
    entries.encoder.save(run.path / "adapter" / "encoder.safetensors")
    make_pipeline_config(config, tokenizer).save(run.path / "adapter")
    entries.index(range(min(1000, held_out))).save(run.path / "index")
    pipe: Any = mmattn.pipeline(run.path / "adapter", index=run.path / "index", device=device)
    inspect.save_traces([pipe.trace(fact.question) for fact in entries.facts[:TRACES]], run.path)

    # Measuring: ways to read the entries, the entries of other questions, none, and a LoRA of equal size.
    for name, way in (
        ("index searched by attention", "index"),
        ("attention to all entries", "all"),
        ("retrieved entries", "hits"),
        ("entries of another question", "shuffled"),
        ("random entries", "random"),
        ("no memory", None),
    ):
        rows += measure.rows(f"adapter, {name}", model, way)
    parameters, _ = model.trainable_parameters()
    model.unload()
    if config.controls:
        torch.manual_seed(config.seed)
        lora = training.matched_lora(lm, parameters)
        loss = answer_loss(lora, tokenizer, with_memory=False)
        train_module(config, lora, loss, questions(config, known), steps, "LoRA", run)
        rows += measure.rows("LoRA, closed book", lora, None)
        lora.unload()
    return {"rows": rows, "seconds": seconds, "steps": steps, "parameters": parameters}


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`, with what was trained."""
    first = contents[0]
    facts = first["part"] == "facts"
    columns = FACTS if facts else DOCS
    runs = [[{**dict.fromkeys(columns), **row, "name": label(row)} for row in one["rows"]] for one in contents]
    for rows in [] if facts else runs:
        lora = next(row["bits"] for row in rows if row["name"] == "LoRA, text only")
        for row in rows:
            row["against"] = row["bits"] - lora
    lines = training.spread_table("", columns, runs)
    parameters = f"{first['parameters']:,} trained parameters"
    if facts:
        seconds = training.mean_and_spread([one["seconds"] for one in contents], 1, ".0f", " s")
        return f"{lines}\n\nadapter: {parameters}, {first['steps']} steps in {seconds}."
    copies = f"{first['copies']:.1%} of the other topics were copies and are taken out."
    return f"{lines}\n\n{parameters}; {first['bytes']:,} bytes of held-out topics; {copies}"


def label(row: dict[str, Any]) -> str:
    """Return a row's name with its size."""
    return row["name"] if row.get("entries") is None else f"{row['name']}, {row['entries']:,} entries"


def load_entries(config: Config) -> tuple[Entries, Entries, int]:
    """Return training facts, entries to measure with (held-out facts first), and the number of held-out facts.

    Facts to train on come before the others that fill indexes in training. Indexes of measuring have facts that
    training does not see, and after them made-up ones. Both have an encoder whose queries are fitted to the former.
    """
    (facts, held_out), data = load_facts(), config.data
    names = facts + held_out
    facts, held_out = sample_facts(facts, len(facts), 0), sample_facts(held_out, len(held_out), 0)
    train_facts = facts[: data.train]
    needed = max(data.sizes) + data.ask
    others = (held_out + facts[data.train :])[:needed]
    others += synthetic(names, needed - len(others))
    encoder = NameEncoder()
    encoder.fit([fact.question for fact in train_facts], [fact.title for fact in train_facts])
    cache, filled = Path(data.cache), train_facts + synthetic(train_facts, data.synthetic)
    known = Entries.of(filled, len(train_facts), encoder, cache, config.progress)
    entries = Entries.of(others, len(held_out), encoder, cache, config.progress)
    for one in (known, entries):
        one.questions = encoder.project_queries(one.questions)
    return known, entries, min(len(held_out), needed)


def sample_facts(facts: list[Fact], count: int, seed: int) -> list[Fact]:
    """Return at most so many facts in a random order of their keys, all facts of a key together."""
    keys = sorted({fact.key for fact in facts})
    Random(seed).shuffle(keys)
    place = {key: number for number, key in enumerate(keys)}
    return sorted(facts, key=lambda fact: place[fact.key])[:count]


def questions(config: Config, known: Entries) -> Iterator[list[Question]]:
    """Yield batches of questions, each with the entries of an index of some size that are most like it.

    Sizes are drawn up to the number of entries, all powers alike; other facts about the key are often among them, and
    the answer may be missing.
    """
    random = torch.Generator().manual_seed(config.seed)
    data, total = config.data, len(known.facts)
    while True:
        rows = torch.randint(len(known.questions), (config.optim.per_device_train_batch_size,), generator=random)
        sizes = torch.exp(torch.rand(len(rows), generator=random) * math.log(total / 2)) * 2
        absent, related = torch.rand(2, len(rows), generator=random) < torch.tensor([[data.absent], [0.7]])
        present = torch.rand(len(rows), total, generator=random) < (sizes / total)[:, None]
        for number, row in enumerate(rows.tolist()):
            present[number, known.by_key[known.facts[row].key]] |= related[number]
            present[number, row] = not absent[number]
        scores = known.questions[rows] @ known.titles.T
        best = scores.masked_fill(~present, -torch.inf).topk(data.per_query)
        yield [
            question(known, row, bool(absent[number]), best.indices[number][best.values[number] > -torch.inf])
            for number, row in enumerate(rows.tolist())
        ]


def question(known: Entries, row: int, absent: bool, view: torch.Tensor) -> Question:
    """Return a question, its answer, and the memory of the entries in view, or of another one if there are none."""
    view = view if len(view) else torch.tensor([(row + 1) % len(known.facts)])
    memory = mmattn.Memory(known.slots(view)[None], scores=(known.titles[view] @ known.questions[row])[None])
    return prompt(known.facts[row]), UNKNOWN if absent else known.facts[row].value, memory


def answer_loss(model: Any, tokenizer: Any, with_memory: bool = True) -> Loss:
    """Return the loss: minus log p of the answers after the questions."""

    def loss(rows: Sequence[Question]) -> tuple[torch.Tensor, int]:
        prompts, answers, memories = zip(*rows, strict=True)
        batch = answer_batch(tokenizer, prompts, answers, mmattn.Memory.stack(memories) if with_memory else None)
        return training.sum_nats(model, batch.to(model.device))

    return loss


def make_pipeline_config(config: Config, tokenizer: Any) -> pipelines.PipelineConfig:
    """Return the file that lets `mmattn ask` load the adapter with its models."""
    questions = ", ".join(f'"{question.format(key="…")}"' for _, question, _ in PROPERTIES.values())
    return pipelines.PipelineConfig(
        task="question-answering",
        host=pipelines.ModelReference.of(config.lm, tokenizer),
        encoder=pipelines.EncoderReference(name="encoder.safetensors"),
        prompt="Question: {question}\nAnswer:",
        refusal=UNKNOWN,
        generation={"max_new_tokens": 24},
        trained_on=f"{config.data.train:,} facts about territories, filed under their names in other languages "
        f"(Babel's copy of the Unicode CLDR). It answers {questions}, and refuses other questions.",
        memory=pipelines.MemoryConfig(top_k=config.data.per_query, fields=("title", "value"), text="{title}: {value}"),
        training={"recipe": "rag", "seed": config.seed, "steps": config.optim.max_steps},
    )
