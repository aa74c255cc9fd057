"""The demo (`make demo`, `mmattn demo`): SmolLM2 learns to answer questions about pictures, and chats as before."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import models, pipelines
from mmattn.recipes import read_settings

from .data import prompt_template
from .settings import Config
from .train import main as train

QUESTION = "What is the capital of France?"


def main(out: str = "runs/demo") -> Path:
    """Train for some minutes, print the table, and compare an answer without a picture with that of the bare model."""
    start = time.perf_counter()
    values = read_settings(Path(__file__).with_name("config_demo.yaml"), [f"out={out}"])
    values.pop("recipe", None)
    settings = Config.model_validate(values)
    run = train(values)
    if not (run / "table.md").is_file():
        return run
    lm, tokenizer = pipelines.load_language_model(settings.lm, "cpu")
    before = chat(lm, tokenizer)
    model = mmattn.load(lm, run / "adapter")
    same = torch.equal(before, chat(model, tokenizer))
    answer = tokenizer.decode(before, skip_special_tokens=True).strip()
    print(f"\nwithout a picture the model chats as before, {'bit for bit' if same else 'BUT NOT bit for bit'}:")
    print(f"  {QUESTION} {answer}")
    print(f"\ntable                        {run / 'table.md'}")
    print(f"answers and attended patches {run / 'answers.png'}")
    print(f"adapter                      {run / 'adapter'}")
    asked = models.load_easy_vqa("test")[0]
    question = asked.text.capitalize()
    print(f"ask about another picture    mmattn caption {asked.picture} --text '{question}' --adapter {run}/adapter")
    print(f"{time.perf_counter() - start:.0f} s")
    return run


@torch.no_grad()
def chat(model: Any, tokenizer: Any) -> torch.Tensor:
    """Return the tokens that a model answers a question with."""
    text = prompt_template(tokenizer).replace("{question}", QUESTION)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    out: torch.Tensor = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :]
