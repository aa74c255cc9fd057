"""A tokenizer of words w4 to w100, and a `datasets.Dataset` of ids with a column of memories."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import tiny

#: Of a Trainer: three steps on the CPU that write nothing.
ARGUMENTS: dict[str, Any] = {"max_steps": 3, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
ARGUMENTS |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
ARGUMENTS |= {"optim": "adamw_torch", "adam_beta2": 0.98, "dataloader_pin_memory": False}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Of the vocabulary of the tiny hosts: 0 pads, 1 begins, 2 ends, 3 is unknown."""
    ids = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{number}": number for number in range(4, tiny.VOCAB)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def rows(count: int = 11, lengths: bool = True) -> list[dict[str, Any]]:
    """Texts as ids, with labels and a memory of their own."""
    made = []
    for number in range(count):
        ids = tiny.text(1, 5 + number % 3 if lengths else 7, seed=number)[0].tolist()
        tokens = tiny.memory(1, m=2 + number % 4 if lengths else 5, seed=number).tokens[0]
        made.append({"input_ids": ids, "labels": ids, "memory": tokens.tolist()})
    return made


def dataset(count: int = 11, lengths: bool = True) -> datasets.Dataset:
    """The same rows as a dataset of Hugging Face."""
    return datasets.Dataset.from_list(rows(count, lengths))


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the adapters' weights."""
    return {name: value.detach().clone() for name, value in model.adapters.named_parameters()}


def unmoved(model: Any, before: dict[str, torch.Tensor]) -> list[str]:
    """Names of the adapters' weights that are still what they were."""
    return [name for name, value in model.adapters.named_parameters() if torch.equal(value, before[name])]
