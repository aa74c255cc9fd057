"""A loop of one's own with accelerate: `accelerate launch --num_processes 2 launched.py FOLDER`."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import default_data_collator

from mmattn import training
from tests import tiny
from tests.interop import tokenised


def main(folder: str, rows_in_a_step: int = 6) -> None:
    accelerator = Accelerator(cpu=True)
    model = tiny.attach(tiny.make("llama"))
    optimizer = torch.optim.AdamW(training.parameter_groups(model, 1e-2))
    collator = training.MemoryCollator(default_data_collator)
    rows = tokenised.dataset(12, lengths=False)
    loader = DataLoader(rows, batch_size=rows_in_a_step // accelerator.num_processes, collate_fn=collator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.unwrap_model(model).save_pretrained(folder, is_main_process=accelerator.is_main_process)
    accelerator.save_state(f"{folder}/state")
    accelerator.wait_for_everyone()
    accelerator.load_state(f"{folder}/state")
    accelerator.print(f"processes {accelerator.num_processes}")
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
