"""Runs of every recipe that take seconds: settings, the rows of their tables, and those that must be equal."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from mmattn.recipes import find_recipe, load_recipe

ROOT = Path(__file__).parents[2]
BATCH = "per_device_train_batch_size"
SMALL = {"num_heads": 2, "head_dim": 6}
STEPS = {"max_steps": 2, BATCH: 5, "warmup_steps": 1}
TOPICS = {
    "loops": 'The "while" statement repeats a suite as long as an expression is true.\n\nA "break" leaves the loop.',
    "calls": "A call runs a function with arguments.\n\nArguments may be given by name.\n\nA call gives a value.",
    "names": "Names refer to objects.\n\nNames are bound by assignment, by import and by definition of functions.",
}
HELD = {"tests": "A test calls a function and compares the value.\n\nArguments may be given by name."}


@dataclass(frozen=True)
class Run:
    """A recipe with its settings (paths begin with {}), the rows of its table, and pairs of rows that are equal."""

    recipe: str
    settings: dict[str, Any]
    rows: tuple[str, ...]
    equal: tuple[tuple[str, str], ...] = ()


VQA = {
    "train_questions": 23,
    "test_questions": 17,
    "cache": "{}/cache",
    "adapter": {"layers": [28], "num_heads": 2, "head_dim": 8, "feed_forward": 0.5},
    "optim": {"max_steps": 3, BATCH: 7, "warmup_steps": 1, "lora_steps": 2},
}
PRIORS = ("the most frequent answer", "the usual answer to each question")
RAG = {
    "lm": "{}/lm",
    "data": {
        "train": 200, "synthetic": 50, "ask": 6, "sizes": [10, 20, 40], "small": 20, "per_query": 12,
        "cache": "{}/cache",
    },
    "optim": {"max_steps": 2, BATCH: 3},
    "docs": {"chunk": 5, "window": 3, "max_steps": 2, "batch_size": 2, "layer": 2, "rank": 3},
}  # fmt: skip
DIFFUSION = {
    "sample": {"steps": 2, "each": 1, "examples": 7},
    "optim": {"max_steps": 3, BATCH: 5, "warmup_steps": 0},
    "style": {"encoder_steps": 2},
}
SCALES = ("1", "1.1", "1.3", "2", "3", "5")
KEYS = {"keys": 30, "values": 11, "ask": 7}
LM = {"width": 16, "depth": 3, "heads": 2, "max_steps": 2, "batch_size": 5}
COMPOSE = {
    "key_model": LM,
    "arithmetic_model": LM | {"width": 24},
    "adapter": SMALL,
    "fused": {"hidden_dim": 5},
    "optim": {"max_steps": 2, BATCH: 6},
}
TRIPLE = ("trained on all three", "only the first given", "only the second given", "each in the place of the other")
SENSOR = (
    "audio only", "audio and sensor", "audio and another utterance's sensor", "audio, the adapter without a sensor",
    "sensor alone, read off its encoder", "audio, LoRA without a sensor",
)  # fmt: skip
VOICES = {"speakers": 2, "held_out": 1, "chatter": 2, "cache": "{}/voices"}
WAYS = {
    "parameters": 30_000,
    "reader": {"width": 32, "depth": 2, "heads": 4, "max_steps": 2, "tokens": 256},
    "gated": {"every": 1, "num_heads": 2, "head_dim": 8, "feed_forward": 0.0},
    "texts": {
        "passages": 3, "statements": 5, "entries": 10, "ask": 4, "requests": 3, "recomputed_tokens": 2,
        "lm": "{}/reader/lm",
    },
    "documents": {"documents": 4, "statements": 12, "times_fewer": 8},
    "optim": {"max_steps": 2, BATCH: 3},
}  # fmt: skip
WAY_ROWS = (
    "no memory", "LoRA, no memory", "in the prompt", "passages read before", "passages, first tokens read again",
    "in the prompt, tuned as long", "gated cross-attention", "inserted tokens", "joined in the model's own attention",
    "a trained prefix", "passages read before, block-tuned", "passages, first tokens read again, block-tuned",
)  # fmt: skip
DOCUMENT_ROWS = (
    "no document", "the whole document in the prompt", "its beginning in the prompt",
    "two whole documents in the prompt", "prefix, not trained",
    *(f"{what}, {how}{whose}" for how in ("next token", "self-study") for what, whose in (
        ("prefix", ""), ("prefix", ", of another document"), ("prefixes", ", of two documents"),
    )),
)  # fmt: skip
FINETUNE = {
    "encoder": "assets/clip",
    "data": {"path": str(ROOT / "assets" / "flora"), "held_out": 2, "cache": "{}/cache"},
    "optim": {"max_steps": 4, BATCH: 3, "warmup_steps": 1, "save_steps": 2, "logging_steps": 2},
    "eval": {"eval_steps": 2, "controls": True},
}
OWN = ("LoRA, text only", "adapter, its own memory", "adapter, shuffled memory", "adapter, no memory")
RUNS = {
    "vision": Run(
        "vision",
        {
            "data": {"path": "{}/drawings", "held_out": 0.5, "flip": False, "cache": "{}/cache"},
            "adapter": {"every": 3, "num_heads": 2, "head_dim": 16, "feed_forward": 1},
            "optim": {"max_steps": 5, BATCH: 7, "warmup_steps": 1, "cache_hidden_states": True},
            "max_new_tokens": 11,
        },
        ("frozen LM", "LoRA, text only",
         *(f"adapter, {kind}" for kind in ("right picture", "shuffled pictures", "no picture"))),
        (("frozen LM", "adapter, no picture"),),
    ),
    "vqa": Run(
        "vqa",
        VQA,
        (*PRIORS, "LoRA, questions only", "frozen model, no picture",
         *(f"adapter, {kind}" for kind in ("no picture", "shuffled pictures", "right picture"))),
        (("frozen model, no picture", "adapter, no picture"),),
    ),
    "rag": Run(
        "rag",
        RAG,
        ("closed book, frozen LM", *["facts in the prompt, frozen LM"] * 3,
         *["adapter, index searched by attention"] * 3, *["adapter, attention to all entries"] * 2,
         *["adapter, retrieved entries"] * 3, *["adapter, entries of another question"] * 3,
         *["adapter, random entries"] * 3, "adapter, no memory", "LoRA, closed book"),
        (("closed book, frozen LM", "adapter, no memory"),),
    ),
    "rag documents": Run(
        "rag",
        RAG | {"part": "docs"},
        ("frozen LM", "neighbours", "neighbours, random ones instead", "continuations",
         "continuations, random ones instead", "both", "both, random ones instead", "both, no memory",
         "both, copies left in the library", "trained and read with random ones", "LoRA, text only"),
    ),
    "diffusion": Run("diffusion", DIFFUSION | {"model": {"channels": [8, 16, 16]}}, SCALES),
    "diffusion transformer": Run(
        "diffusion", DIFFUSION | {"model": {"kind": "transformer", "layers": 3, "heads": 2, "head_dim": 10}}, SCALES
    ),
    "compose": Run(
        "compose",
        COMPOSE | {"data": KEYS},
        ("m_A, knows the keys", "m_B, does arithmetic", "ceiling: m_B with the values filled in",
         *(f"composed, trained on {way}" for way in ("substitution", "KV-arithmetic", "all three")),
         "fused caches, trained on all three", "LoRA on m_B", "random m_A", "fused caches of a random m_A",
         "vanilla m_A, never taught the keys"),
    ),
    "compose three": Run(
        "compose",
        COMPOSE | {"data": KEYS | {"key_models": 2}},
        ("m_A, knows the keys", "m_C, knows the keys", "m_B, does arithmetic", "ceiling: m_B with the values filled in",
         *(f"{way}, {what}" for way in ("composed", "fused caches") for what in TRIPLE), "LoRA on m_B", "random m_A",
         "fused caches of a random m_A"),
    ),
    "listen": Run(
        "listen",
        {
            "voices": VOICES,
            "recogniser": {**STEPS, "width": 16, "heads": 2, "bands": 16, "convolutions": 2, "adapter": SMALL},
            "sensor": {
                "held_out": 16, "calibration": 5, "optim": STEPS, "adapter": SMALL, "encoder": {**STEPS, "width": 8},
            },
        },
        SENSOR,
        (("audio only", "audio, the adapter without a sensor"),),
    ),
    "listen series": Run(
        "listen",
        {
            "part": "series",
            "series": {"samples": 1100, "patch": 50, "train": 7, "held_out": 11},
            "lm": {**STEPS, "width": 16, "heads": 2, "layers": 2},
            "describing": {"optim": STEPS, "adapter": SMALL},
        },
        ("frozen LM, no series", *(f"adapter, {which} series" for which in ("its", "another's", "no")),
         "LoRA, no series"),
        (("frozen LM, no series", "adapter, no series"),),
    ),
    "translate": Run(
        "translate",
        {
            "data": {"held_out": 13, "written": 200, "vocabulary": 400},
            "model": {"dim": 24, "num_heads": 2, "layers": 1, "feed_forward": 2.0},
            "optim": {"max_steps": 7, BATCH: 11, "warmup_steps": 2},
            "writing": {"beams": 3, "batch": 5},
            "alignment": {"sentences": 2},
        },
        ("rotary", "rotary, another's source", "sinusoidal", "learned", "alibi", "no cross-attention"),
    ),
    "ways reader": Run("ways", WAYS | {"task": "reader"}, ("5 statements", "10 statements", "15 statements")),
    "ways passages": Run("ways", WAYS | {"task": "passages"}, WAY_ROWS),
    "ways documents": Run("ways", WAYS | {"task": "documents"}, DOCUMENT_ROWS),
    "finetune": Run(
        "finetune",
        FINETUNE | {
            "lm": "assets/lm",
            "adapter": {"every": 3, "num_heads": 2, "head_dim": 16, "feed_forward": 1},
            "caption": {"max_new_tokens": 5},
        },
        OWN,
    ),
}  # fmt: skip


def placed(settings: Any, folder: Path) -> Any:
    """Return settings with the folder of the runs in their paths."""
    if isinstance(settings, dict):
        return {name: placed(value, folder) for name, value in settings.items()}
    return settings.replace("{}", str(folder)) if isinstance(settings, str) else settings


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the settings of a run below a folder."""
    out = str(folder / name.removeprefix("ways "))
    return {"out": out, "progress": False, "device": "cpu", **placed(RUNS[name].settings, folder)}


def make_drawings(folder: Path) -> None:
    """Copy two of the shipped drawings of each species: one to train on, one to measure on."""
    for species in (ROOT / "assets" / "flowers" / "pictures").iterdir():
        (folder / species.name).mkdir(parents=True)
        for file in sorted(species.iterdir())[:2]:
            shutil.copy(file, folder / species.name)


def make_lm(folder: Path) -> None:
    """Save a random language model and a tokenizer that knows the words of some questions."""
    script, facts = load_recipe(ROOT / "assets" / "rag", "make_lm"), load_recipe(find_recipe("rag").folder, "data")
    torch.manual_seed(0)
    texts = list(script.questions(facts.load_facts()[0], 50, Random(0)))
    tokenizer = script.train_tokenizer([*texts, *TOPICS.values()], 500)
    script.build(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Instead of espeak-ng a tone for each text, higher or lower with the speaker; few topics of documentation."""
    listen, rag = find_recipe("listen").folder, find_recipe("rag").folder

    def say(text: str, speaker: Any, sampling_rate: int) -> Any:
        time = np.arange(round(0.2 * sampling_rate)) / sampling_rate
        return np.float32(np.sin(2 * math.pi * (200 + 37 * len(text) + speaker.pitch) * time))

    def topics(copies: bool = False) -> tuple[dict[str, str], dict[str, str]]:
        return (TOPICS | {"copy": HELD["tests"]} if copies else TOPICS), HELD

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_recipe(listen, "voices"), "say", say)
        patch.setattr(load_recipe(listen, "voices"), "check_voices", lambda voices: None)
        patch.setattr(load_recipe(rag, "train_docs"), "load_topics", topics)
        yield
