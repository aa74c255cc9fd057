"""Questions and answers: how answers are trained, generated with a memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mmattn
from mmattn import inspect, pipelines, training

from .settings import Config

Loss = Callable[[Sequence[Any]], tuple[Tensor, Tensor | int]]  # nats of a batch, and its number of targets
MemoryOf = Callable[[list[int]], Any]  # the memory of some of the questions, by their numbers
LONGEST = 24  # tokens of an answer


def load_lm(name: str, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """Load the frozen language model and its tokenizer, which pads on the left for generation."""
    lm, tokenizer = pipelines.load_language_model(name, device)
    tokenizer.padding_side = "left"
    return lm, tokenizer


def answer_batch(
    tokenizer: Any, prompts: Sequence[str], answers: Sequence[str], memory: mmattn.Memory | None = None
) -> training.TextBatch:
    """Return prompts with their answers as a batch in which only the answers have labels."""
    begin, end = training.bos_and_eos(tokenizer)
    prompt_ids = tokenizer(list(prompts))["input_ids"]
    answer_ids = tokenizer([f" {answer}" for answer in answers])["input_ids"]
    batch = training.collate([[begin, *a, *b, end] for a, b in zip(prompt_ids, answer_ids, strict=True)], memory)
    for row, ids in enumerate(prompt_ids):
        batch.labels[row, : len(ids) + 1] = -100
    return batch


def train(
    config: Config,
    module: nn.Module,
    loss: Loss,
    batches: Iterator[Sequence[Any]],
    steps: int,
    label: str,
    run: training.RunFolder,
) -> float:
    """Train the weights of a module that are not frozen, a batch in each step; return the seconds."""

    class BatchTrainer(training.AdapterTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            nats, targets = loss(inputs["rows"])
            return nats / targets

    trainer = BatchTrainer(
        module,
        config.optim.arguments(config, max_steps=steps, per_device_train_batch_size=1, use_cache=True),
        data_collator=lambda _: {"rows": next(batches)},
        train_dataset=range(steps),
        gate_learning_rate=config.optim.gate_learning_rate,
    )
    return run.train(trainer, label, config.progress)


def write_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    memory_of: MemoryOf | None = None,
    batch: int = 64,
) -> list[str]:
    """Generate an answer to each prompt, greedily."""
    answers: list[str] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        memory = None if memory_of is None else memory_on(model, memory_of(list(range(start, start + len(part)))))
        answers += pipelines.generate_texts(
            model, tokenizer, part, memory, batch_size=batch, options={"max_new_tokens": LONGEST}
        )
    return answers


@torch.no_grad()
def most_attended(
    model: Any, tokenizer: Any, prompts: Sequence[str], memory_of: MemoryOf, batch: int = 32
) -> list[Any]:
    """Return for each prompt the entry with most weight at its last token: its id, or its place in the memory."""
    begin = tokenizer.decode([training.bos_and_eos(tokenizer)[0]])
    entries: list[Any] = []
    for start in range(0, len(prompts), batch):
        texts = [begin + text for text in prompts[start : start + batch]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        memory = memory_on(model, memory_of(list(range(start, start + len(texts)))))
        # The weights of all entries are recorded: of the last token alone.
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        before = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], memory=memory, use_cache=True)
        with inspect.record(model) as weights:
            model(input_ids=ids[:, -1:], attention_mask=mask, memory=memory, cache=before.cache)
        places = weights.mean()[0][:, -1].argmax(1).tolist()
        sources = getattr(memory, "sources", None)
        entries += places if sources is None else [sources[row][place]["id"] for row, place in enumerate(places)]
    return entries


def memory_on(model: Any, memory: Any) -> Any:
    """Return a memory on the device of the model; a searched one stays where it is."""
    return memory.to(model.device) if isinstance(memory, mmattn.Memory) else memory
