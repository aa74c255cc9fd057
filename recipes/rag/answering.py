"""Questions with a memory: how hits become what an adapter attends to, how answers are learned and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import mmattn
from mmattn import pipelines, training

from .facts import UNKNOWN
from .settings import Config

#: The memory of some of the questions, by their numbers.
Attended = Callable[[list[int]], Any]


def load_lm(name: str, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """Load the frozen language model and its tokenizer, which pads on the left for generation."""
    lm, tokenizer = pipelines.load_language_model(name, device)
    tokenizer.padding_side = "left"
    return lm, tokenizer


def adapter_settings(config: Config, memory_dim: int) -> mmattn.GatedAdapter:
    """The adapter of the settings."""
    return mmattn.GatedAdapter(memory_dim=memory_dim, score_bias=True, **config.adapter.model_dump())


def describe(config: Config, tokenizer: Any, results: str = "") -> pipelines.PipelineConfig:
    """What `mmattn ask` needs of an adapter of this recipe."""
    facts = config.part == "facts"
    told = {
        "prompt": "Question: {question}\nAnswer:",
        "refusal": UNKNOWN,
        "generation": {"max_new_tokens": 24},
        "trained_on": f"{config.data.train:,} facts about territories, filed under their names in other languages "
        "(Babel's copy of the Unicode CLDR).",
        "memory": pipelines.MemoryConfig(
            top_k=config.data.per_query, fields=("title", "value"), text="{title}: {value}"
        ),
    }
    if not facts:
        told = {
            "generation": {"max_new_tokens": 48, "repetition_penalty": 1.2},
            "trained_on": "The topics of Python's documentation, with passages of the others beside them.",
            "memory": pipelines.MemoryConfig(top_k=config.docs.neighbours, host_layer=config.docs.layer),
        }
    return pipelines.PipelineConfig(
        task="question-answering" if facts else "text-generation",
        host=pipelines.ModelReference.of(config.lm, tokenizer, lora=None if facts else "../lora"),
        encoder=pipelines.EncoderReference(name="encoder.safetensors" if facts else "all-MiniLM-L6-v2"),
        training={
            "recipe": "rag",
            "seed": config.seed,
            "steps": config.optim.max_steps if facts else config.docs.max_steps,
        },
        results=results,
        **told,
    )


def answer_batch(
    tokenizer: Any, prompts: Sequence[str], answers: Sequence[str], memory: mmattn.Memory | None
) -> training.TextBatch:
    """Prompts and answers as rows that learn the answers alone."""
    begin, end = training.bos_and_eos(tokenizer)
    asked = tokenizer(list(prompts))["input_ids"]
    said = tokenizer([f" {answer}" for answer in answers])["input_ids"]
    rows = [[begin, *one, *other, end] for one, other in zip(asked, said, strict=True)]
    batch = training.collate(rows, memory)
    for row, one in enumerate(asked):
        batch.labels[row, : len(one) + 1] = -100
    return batch


def learn(
    config: Config,
    trained: nn.Module,
    loss: training.Loss,
    batches: Iterable[Sequence[Any]],
    steps: int,
    label: str,
    run: training.RunFolder,
    accelerator: Any,
) -> float:
    """Train the weights of a module that are not frozen, with the settings of the run; seconds."""
    optim = config.optim
    learning = training.TrainingConfig(
        max_steps=steps,
        learning_rate=optim.learning_rate,
        gate_learning_rate=optim.gate_learning_rate,
        weight_decay=optim.weight_decay,
        warmup_steps=optim.warmup_steps,
        max_grad_norm=optim.max_grad_norm,
        seed=config.seed,
    )
    done = training.train(
        trained,
        loss,
        batches,
        learning,
        accelerator,
        log=lambda **figures: run.log(model=label, **figures),
        label=label,
        progress=config.progress,
    )
    if done.interrupted:
        raise KeyboardInterrupt
    return done.seconds


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes."""
    return next(model.parameters()).device


@torch.no_grad()
def write_answers(
    model: Any, tokenizer: Any, prompts: Sequence[str], attended: Attended | None, batch: int = 64, longest: int = 24
) -> list[str]:
    """What the model writes after each prompt, greedily."""
    out: list[str] = []
    for rows, given in batches(model, tokenizer, prompts, batch):
        ids = model.generate(
            given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=longest, do_sample=False,
            eos_token_id=training.bos_and_eos(tokenizer)[1], pad_token_id=tokenizer.pad_token_id,
            **({} if attended is None else {"memory": _on(attended(rows), model)}),
        )  # fmt: skip
        new = ids[:, given["input_ids"].shape[1] :]
        out += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return out


@torch.no_grad()
def looks(model: Any, tokenizer: Any, prompts: Sequence[str], attended: Attended, batch: int = 32) -> list[Any]:
    """For each prompt the entry with most weight at its last token: its id, or its place in the memory."""
    out: list[Any] = []
    for rows, given in batches(model, tokenizer, prompts, batch):
        memory = _on(attended(rows), model)
        with mmattn.inspect.record(model) as weights:
            model(**given, memory=memory)
        first = weights.mean()[0][:, -1].argmax(1).tolist()
        named = getattr(memory, "sources", None)
        out += first if named is None else [named[row][slot]["id"] for row, slot in enumerate(first)]
    return out


def batches(model: Any, tokenizer: Any, prompts: Sequence[str], size: int) -> Iterator[tuple[list[int], Any]]:
    """The numbers of some prompts, and their tokens."""
    begin, _ = training.bos_and_eos(tokenizer)
    for start in range(0, len(prompts), size):
        rows = list(range(start, min(start + size, len(prompts))))
        texts = [tokenizer.decode([begin]) + prompts[row] for row in rows]
        yield rows, tokenizer(texts, return_tensors="pt", padding=True).to(device_of(model))


def _on(memory: Any, model: Any) -> Any:
    return memory.to(device_of(model)) if isinstance(memory, mmattn.Memory) else memory


def trace(model: Any, tokenizer: Any, asked: str, answer: str, memory: mmattn.Memory) -> mmattn.inspect.Trace:
    """Which entries of one row of memory each word of an answer attended to."""
    begin, end = training.bos_and_eos(tokenizer)
    given = tokenizer(asked)["input_ids"]
    ids = [begin, *given, *tokenizer(f" {answer}")["input_ids"], end]
    words = [tokenizer.decode([one]) for one in ids]
    return mmattn.inspect.attribute(
        model, ids, memory.to(device_of(model)), words, start=1 + len(given), title=f"{asked} {answer}"
    )
