"""Nothing of mmattn uses a name that transformers calls deprecated: it would warn users of what they did not do.

    python -m tests.hosts.test_deprecated_names

uses every kind of host once and prints what transformers says.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import mmattn
from tests import tiny
from tests.families.building import tiny_model

IDS = torch.tensor([[5, 9, 3, 7, 11], [4, 6, 8, 2, 13]])


def memory() -> mmattn.Memory:
    return tiny.memory(2, 3)


def language_model(family: str, adapter: Any = None) -> None:
    adapter = adapter or mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM)
    model = mmattn.attach(tiny.make(family), adapter)
    output = model(IDS, memory=memory(), labels=IDS)
    output.loss.backward()
    model(IDS, memory=memory(), use_cache=False)
    with model.condition(memory()):
        cache = next(part for part in model(IDS, use_cache=True).values() if hasattr(part, "get_seq_length"))
        model(IDS[:, :1], **tiny.going_on(cache))
    model.generate(IDS, memory=memory(), max_new_tokens=2)
    model.unload()


def composed() -> None:
    """With a LoRA in the model that reads along."""
    other = peft.get_peft_model(tiny.make("llama", 1), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    adapter = mmattn.ComposedAdapter(memory_dim=32, layers=(0, 2), augmenting_layers=(0, 2))
    model = mmattn.attach(tiny.make("gpt2"), adapter)
    model.generate(IDS, memory=mmattn.AugmentingModel(other), max_new_tokens=2)


def with_lora() -> None:
    host = peft.get_peft_model(tiny.make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM))
    model(input_ids=IDS, memory=memory(), labels=IDS).loss.backward()
    model.generate(IDS, memory=memory(), max_new_tokens=2)


def encoder_decoder() -> None:
    host = tiny_model("t5", transformers.AutoModelForSeq2SeqLM)
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM))
    model(input_ids=IDS, decoder_input_ids=IDS, memory=memory())
    model.generate(IDS, memory=memory(), max_new_tokens=2)


def encoder() -> None:
    host = tiny_model("bert", transformers.AutoModelForSequenceClassification)
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM))
    model(input_ids=IDS, memory=memory())
    model(input_ids=IDS, memory=memory(), return_dict=False)


def trainer() -> None:
    """A step that computes activations again, with the loss in chunks and without."""
    from mmattn import training

    row = {"input_ids": IDS[0], "labels": IDS[0], "memory": memory().tokens[0]}
    model = mmattn.attach(tiny.make("llama"), mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM))
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {"output_dir": folder, "max_steps": 1, "report_to": "none", "use_cpu": True}
        arguments |= {"dataloader_pin_memory": False, "disable_tqdm": True, "logging_steps": 10}
        arguments["activation_checkpointing" if tiny.IS_5_24 else "gradient_checkpointing"] = True
        collator = training.MemoryCollator(transformers.DefaultDataCollator())
        training.AdapterTrainer(
            model=model,
            args=transformers.TrainingArguments(**arguments),
            data_collator=collator,
            train_dataset=[row] * 2,
        ).train()


def cached() -> None:
    """Prompts and hidden states of lower layers that were computed before."""
    from mmattn import training

    model = mmattn.attach(tiny.make("llama"), mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(2,)))
    with training.cached_prompts(model, [row[:3].tolist() for row in IDS]) as prompts:
        model(**prompts[[0, 1]], memory=memory())


USES: dict[str, Callable[[], None]] = {
    "llama": lambda: language_model("llama"),
    "gpt2": lambda: language_model("gpt2"),
    "mamba": lambda: language_model("mamba"),
    "embeddings": lambda: language_model("llama", mmattn.adapters.InsertedAdapter(memory_dim=tiny.MEMORY_DIM)),
    "composed": composed,
    "with lora": with_lora,
    "encoder-decoder": encoder_decoder,
    "encoder": encoder,
    "trainer": trainer,
    "cached": cached,
}


class Notes(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Record in a list what is logged and warned of in the block, but for a name that peft asks models for."""
    notes = Notes()
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(notes)
    clear = getattr(logging.Logger.warning_once, "cache_clear", None)
    if clear is not None:
        clear()  # what another test was told once
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            yield notes.lines
            warned = [str(one.message) for one in given]
            notes.lines += [line for line in warned if not line.startswith("`is_gradient_checkpointing`")]
    finally:
        logger.removeHandler(notes)


@pytest.mark.parametrize("use", USES)
def test_nothing_deprecated_is_used(use: str) -> None:
    """Invariant 177."""
    with said() as lines:
        USES[use]()
    assert [line for line in lines if "deprecated" in line] == []


@pytest.mark.slow
def test_a_fresh_process_is_told_nothing() -> None:
    """Invariant 177. With all of transformers' and Python's warnings on."""
    command = [sys.executable, "-m", "tests.hosts.test_deprecated_names"]
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "deprecated" in line] == []


if __name__ == "__main__":
    transformers.logging.set_verbosity_warning()
    for use in USES.values():
        with said() as lines:
            use()
        print("\n".join(lines))
