"""A process of two that train on one `IterableDataset`: prints the rows that it saw, and its weights."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainingArguments

import mmattn
from mmattn import training
from tests import tiny

ROWS = [
    {
        "input_ids": [5 + i, 6, 7, 8],
        "labels": [5 + i, 6, 7, 8],
        "memory": tiny.memory(1, 2 + i % 3, seed=i).tokens[0].tolist(),
    }
    for i in range(8)
]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def main(folder: str) -> None:
    torch.manual_seed(0)
    model = mmattn.attach(tiny.make("llama"), mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, every=1))
    seen = []
    collate = training.MemoryCollator(lambda rows: {key: torch.tensor([row[key] for row in rows]) for key in rows[0]})

    class Trainer(training.AdapterTrainer):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            memory = inputs["memory"]
            real = [memory.tokens[i][memory.real_slots()[i]].tolist() for i in range(memory.batch)]
            seen.extend(zip(inputs["input_ids"][:, 0].tolist(), real, strict=True))
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
            return loss

    given = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        folder, max_steps=2, per_device_train_batch_size=2, dataloader_pin_memory=False, learning_rate=0.1, **given
    )
    Trainer(model=model, args=arguments, train_dataset=Stream(), data_collator=collate).train()
    weights = b"".join(one.detach().numpy().tobytes() for one in model.adapters.parameters())
    result = {"seen": seen, "weights": hashlib.sha256(weights).hexdigest()}
    with open(os.path.join(folder, f"{os.environ['RANK']}.json"), "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(sys.argv[1])
    torch.distributed.destroy_process_group()
