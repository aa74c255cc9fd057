"""easy-VQA: its pictures as memories, its questions as prompts of the language model, its answers as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import mmattn
from mmattn import models, training
from mmattn.errors import ConfigError

from .settings import Config

#: What a question asks for, by its answer.
KINDS = {"yes": "yes or no", "no": "yes or no", "circle": "shape", "rectangle": "shape", "triangle": "shape"}


@dataclass(frozen=True)
class Questions:
    """Questions with the number of the text, the prompt, the picture and the answer of each; `pictures` are files."""

    rows: Sequence[models.Question]
    pictures: Sequence[Path]
    text: Tensor
    prompt: Tensor
    picture: Tensor
    answer: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def kinds(self, answers: Sequence[str]) -> dict[str, Tensor]:
        """Return the numbers of the questions of each kind."""
        kinds = [KINDS.get(answers[answer], "colour") for answer in self.answer.tolist()]
        return {
            name: torch.tensor([row for row, kind in enumerate(kinds) if kind == name])
            for name in ("yes or no", "shape", "colour")
        }


@dataclass(frozen=True)
class Data:
    """The public split into training and test, and what both share: questions and answers, as texts and as ids.

    Prompts are those of all texts in the first spelling, then in the second, and so on.
    """

    train: Questions
    test: Questions
    texts: list[str]
    spelled: list[str]  # of each prompt
    answers: list[str]
    prompts: list[list[int]]
    ends: list[list[int]]  # of each answer, with the token that ends it

    @property
    def tokens(self) -> Tensor:
        """The first token of each answer."""
        return torch.tensor([ids[0] for ids in self.ends])


def load_data(
    tokenizer: PreTrainedTokenizerBase,
    train_questions: int | None = None,
    test_questions: int | None = None,
    seed: int = 0,
    ways: int = 1,
) -> Data:
    """Read the questions, or draw so many of them, and write each as a prompt in a random spelling.

    A question has the first `ways` of its spellings. The seed draws those of training; those of the test stay the same.
    """
    splits = []
    for split, count in (("train", train_questions), ("test", test_questions)):
        rows = models.load_easy_vqa(split)
        splits.append(rows if count is None else Random(0).sample(rows, min(count, len(rows))))
    texts = sorted({row.text for rows in splits for row in rows})
    answers = sorted({row.answer for rows in splits for row in rows})
    ends = [[*_ids(tokenizer, answer.capitalize()), tokenizer.eos_token_id] for answer in answers]
    if len({ids[0] for ids in ends}) != len(answers):
        raise ConfigError("answers are told apart by their first token, and two begin alike in this tokenizer")
    train, test = (_numbered(splits[split], texts, answers, ways, drawn) for split, drawn in enumerate((seed, 0)))
    template = prompt_template(tokenizer)
    spelled = [spellings(text)[way] for way in range(ways) for text in texts]
    prompts = [_ids(tokenizer, template.replace("{question}", text)) for text in spelled]
    return Data(train, test, texts, spelled, answers, prompts, ends)


def spellings(text: str) -> list[str]:
    """Return a question as people type it; the pipeline strips blanks around it.

    >>> spellings("is it red?")
    ['Is it red?', 'is it red?', 'Is it red', 'is it red']
    """
    bare = text.rstrip("?")
    return [start + bare[1:] + mark for mark in ("?", "") for start in (bare[0].upper(), bare[0])]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _numbered(rows: Sequence[models.Question], texts: list[str], answers: list[str], ways: int, seed: int) -> Questions:
    pictures = sorted({row.picture for row in rows})
    numbers = {picture: number for number, picture in enumerate(pictures)}
    text = torch.tensor([texts.index(row.text) for row in rows])
    random = torch.Generator().manual_seed(seed)
    spelling = torch.randint(ways, (len(rows),), generator=random)
    return Questions(
        rows,
        pictures,
        text,
        spelling * len(texts) + text,
        torch.tensor([numbers[row.picture] for row in rows]),
        torch.tensor([answers.index(row.answer) for row in rows]),
    )


def prompt_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prompt of a question as a turn of the host's chat template, or plainly where it has none."""
    if tokenizer.chat_template is None:
        return f"{tokenizer.bos_token or ''}Question: {{question}}\nAnswer:"
    messages = [{"role": "user", "content": "{question}"}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def training_tokens(data: Data, every: int = 8) -> tuple[list[list[int]], Tensor]:
    """Return texts, and for each token to train (n, 3) the text before it, the picture and the token itself.

    It is the first token of the answer to each question, and at each eighth question the others, too: most answers
    have one. Before the others a question has one spelling for each answer, so that fewer texts are read.
    """
    texts, rows = list(data.prompts), []
    number: dict[tuple[int, ...], int] = {tuple(text): row for row, text in enumerate(texts)}
    spelled = len(data.prompts) // len(data.texts)
    questions = data.train
    columns = (
        questions.text.tolist(),
        questions.prompt.tolist(),
        questions.picture.tolist(),
        questions.answer.tolist(),
    )
    for question, (asked, prompt, picture, answer) in enumerate(zip(*columns, strict=True)):
        ids = data.ends[answer]
        rows.append((prompt, picture, ids[0]))
        for count in range(1, len(ids) if question % every == 0 else 1):
            text = [*data.prompts[answer % spelled * len(data.texts) + asked], *ids[:count]]
            if tuple(text) not in number:
                number[tuple(text)] = len(texts)
                texts.append(text)
            rows.append((number[tuple(text)], picture, ids[count]))
    return texts, torch.tensor(rows)


def encode(encoder: Any, questions: Questions, folder: Path) -> mmattn.Memory:
    """Return the memory of each picture; encoded once, and read from the folder by later runs."""
    pictures = Dataset.from_dict({"image": list(map(str, questions.pictures))})
    encoded = training.encode_dataset(pictures, folder, pictures=encoder)
    memory = training.stack_memories(encoded.with_format("torch"))
    assert memory is not None
    return mmattn.Memory(memory.tokens, memory.mask)


def answer_shares(data: Data) -> Tensor:
    """Return the share (texts, answers) of each answer to each question of training, 0 if it is not asked there."""
    counts = torch.zeros(len(data.texts), len(data.answers))
    counts.index_put_((data.train.text, data.train.answer), torch.tensor(1.0), accumulate=True)
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


def prior_rows(data: Data) -> list[dict[str, Any]]:
    """Return what the answers of the training questions tell about those of the test, without any model."""
    most = data.train.answer.bincount().argmax()
    usual = answer_shares(data).argmax(1)[data.test.text]
    return [
        row(data, "the most frequent answer", data.tokens[most].expand(len(data.test))),
        row(data, "the usual answer to each question", data.tokens[usual]),
    ]


def row(data: Data, name: str, predicted: Tensor) -> dict[str, Any]:
    """Return the share of right tokens (n,) for the test questions, in all and by kind."""
    right = (predicted == data.tokens[data.test.answer]).float()
    kinds = data.test.kinds(data.answers)
    shares = {kind: right[rows].mean().item() if len(rows) else None for kind, rows in kinds.items()}
    return {"name": name, "all": right.mean().item(), **shares, "parameters": 0, "seconds": None}


def spelling_shares(data: Data, predicted: Tensor) -> dict[str, float]:
    """Return the share of right tokens (n,) for the test questions in each spelling, by an example."""
    right, spelling = predicted == data.tokens[data.test.answer], data.test.prompt // len(data.texts)
    return {
        text: right[spelling == number].float().mean().item()
        for number, text in enumerate(spellings("is it red?"))
        if (spelling == number).any()
    }


def train_rows(
    model: Any,
    name: str,
    rows: Sequence[Any],
    loss: Callable[[Tensor], Tensor],
    settings: Config,
    run: training.RunFolder,
    **fields: Any,
) -> float:
    """Train a model by the mean loss of rows; return the seconds. `fields` of `TrainingArguments` override settings."""

    class RowTrainer(training.AdapterTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            return loss(inputs["rows"])

    optim = settings.optim
    trainer = RowTrainer(
        model,
        optim.arguments(settings, **fields),
        data_collator=lambda rows: {"rows": torch.stack([torch.as_tensor(row) for row in rows])},
        train_dataset=rows,
        gate_learning_rate=optim.gate_learning_rate,
        calibrate=optim.calibrate,
    )
    return run.train(trainer, name, settings.progress)
