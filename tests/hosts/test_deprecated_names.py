"""Nothing of mmattn uses a name that transformers calls deprecated: it would warn users of what they did not do."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import SkipTest

import peft
import pytest
import torch
import transformers
from torch import nn

import mmattn
from mmattn.testing import Case
from mmattn.testing.adapter_calls import check_generation
from mmattn.testing.adapter_life import check_gradients_reach_the_adapter
from tests import tiny
from tests.test_contract import ADAPTERS

IDS = torch.tensor([[5, 9, 3, 7, 11], [4, 6, 8, 2, 13]])
GATED = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM)


def memory() -> mmattn.Memory:
    return tiny.memory(2, 3)


def checked(make: Callable[[], Case]) -> None:
    """Train and write with a memory, and go on from a cache."""
    case = make()
    check_gradients_reach_the_adapter(case)
    with contextlib.suppress(SkipTest):
        check_generation(case)


def with_lora() -> nn.Module:
    host: nn.Module = peft.get_peft_model(tiny.make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    return host.requires_grad_(False)


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


CASES = {name: ADAPTERS[name] for name in ("gated, llama", "composed, llama", "prefix, gpt2", "inserted, llama")}
CASES |= {name: ADAPTERS[name] for name in ("gated, t5", "gated, modernbert", "decoupled, unet")}
CASES |= {"mamba": lambda: Case(GATED, lambda: tiny.make("mamba")), "with lora": lambda: Case(GATED, with_lora)}
USES: dict[str, Callable[[], None]] = {name: functools.partial(checked, case) for name, case in CASES.items()}
USES |= {"trainer": trainer, "cached": cached}


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Record in a list what is logged and warned of in the block, but for a name that peft asks models for."""
    lines, notes = list[str](), logging.Handler()
    notes.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(notes)
    clear = getattr(logging.Logger.warning_once, "cache_clear", None)
    if clear is not None:
        clear()  # what another test was told once
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            yield lines
            warned = [str(one.message) for one in given]
            lines += [line for line in warned if not line.startswith("`is_gradient_checkpointing`")]
    finally:
        logger.removeHandler(notes)


@pytest.mark.parametrize("use", USES)
def test_nothing_deprecated_is_used(use: str) -> None:
    """Invariant 177."""
    with said() as lines:
        USES[use]()
    assert [line for line in lines if "deprecated" in line] == []
